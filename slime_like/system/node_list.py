"""Slurm's notation for many host names at once, read without Slurm's tools.

``node[08-10,12],gpu-a[1-2]b`` is node08, node09, node10, node12, gpu-a1b, gpu-a2b: a bracket stands for each of its
numbers and ranges in turn, a range's numbers are as wide as its lower end is written, and of several brackets in one
name the last varies fastest (the format of ``SLURM_JOB_NODELIST``; ``scontrol show hostnames`` does the same).
"""

import itertools
import re
from collections.abc import Iterator

MOST_NODES = 65_536
_PART = re.compile(r"\[([^\[\]]*)\]|([^\[\],]+)")
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")


def expand_node_list(text: str) -> list[str]:
    """Host names in the order in which ``text`` names them.

    Raises:
        ValueError: it cannot be read; the message names what and where.
    """
    names: list[str] = []
    for term in _terms(text):
        for name in _names(term):
            names.append(name)
            if len(names) > MOST_NODES:
                raise ValueError(f"node list {text!r} names more than {MOST_NODES} nodes")
    return names


def _terms(text: str) -> Iterator[str]:
    """The parts between commas outside brackets."""
    start = depth = 0
    for position, letter in enumerate(f"{text},"):
        depth += (letter == "[") - (letter == "]")
        if depth not in (0, 1):
            raise ValueError(f"node list {text!r}: bracket at {position + 1} opens or closes none")
        if letter == "," and depth == 0:
            term = text[start:position].strip()
            if not term:
                raise ValueError(f"node list {text!r}: an empty name before position {position + 1}")
            yield term
            start = position + 1
    if depth:
        raise ValueError(f"node list {text!r}: a bracket is not closed")


def _names(term: str) -> Iterator[str]:
    choices = [_numbers(found[1], term) if found[1] is not None else [found[2]] for found in _PART.finditer(term)]
    return ("".join(parts) for parts in itertools.product(*choices))


def _numbers(inside: str, term: str) -> list[str]:
    numbers: list[str] = []
    for part in inside.split(","):
        found = _RANGE.fullmatch(part.strip())
        if not found:
            raise ValueError(f"node list term {term!r}: {part!r} is neither a number nor a range such as 01-16")
        low, high = found[1], found[2] or found[1]
        if not 0 <= int(high) - int(low) < MOST_NODES:
            raise ValueError(f"node list term {term!r}: the range {part!r} counts down, or too far")
        numbers += [str(number).zfill(len(low)) for number in range(int(low), int(high) + 1)]
    return numbers
