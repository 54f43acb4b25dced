"""Slurm's notation for lists of host names, read without Slurm's tools.

``node[08-10,12],gpu-a[1-2]b`` is node08, node09, node10, node12, gpu-a1b, gpu-a2b. A range's numbers are as wide as its
lower end is written. If a name has several brackets, the last one varies fastest. This is the format of
``SLURM_JOB_NODELIST``. ``scontrol show hostnames`` prints the same names.
"""

import itertools
import re

MOST_NODES = 65_536
_BETWEEN_TERMS = re.compile(r",(?![^\[]*\])")
_TERM = re.compile(r"(?:[^\[\]]|\[[^\[\]]+\])+")
_PART = re.compile(r"\[(.+?)\]|([^\[]+)")
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")


def expand_node_list(text: str) -> list[str]:
    """Return the host names in the order of ``text``.

    Raises ``ValueError`` if the text cannot be read, or names too many nodes.
    """
    names: list[str] = []
    for term in map(str.strip, _BETWEEN_TERMS.split(text)):
        if not _TERM.fullmatch(term):
            raise ValueError(f"node list {text!r}: {term!r} is not a name such as node1 or node[01-16,20]")
        choices = [_numbers(numbers, term) if numbers else [name] for numbers, name in _PART.findall(term)]
        names += map("".join, itertools.islice(itertools.product(*choices), MOST_NODES + 1))
        if len(names) > MOST_NODES:
            raise ValueError(f"node list {text!r} names more than {MOST_NODES} nodes")
    return names


def _numbers(inside: str, term: str) -> list[str]:
    numbers: list[str] = []
    for part in inside.split(","):
        found = _RANGE.fullmatch(part.strip())
        if not found:
            raise ValueError(f"node list term {term!r}: {part!r} is neither a number nor a range such as 01-16")
        low, high = found[1], found[2] or found[1]
        if not 0 <= int(high) - int(low) < MOST_NODES:
            raise ValueError(f"node list term {term!r}: the range {part!r} counts down, or is too long")
        numbers += [str(number).zfill(len(low)) for number in range(int(low), int(high) + 1)]
    return numbers
