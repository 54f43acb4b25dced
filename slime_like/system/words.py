"""Words and numbers in text: sentences with three significant digits, and boxed answers in LaTeX."""

import math
import re
from pathlib import Path

_HOURS_FROM_S = 3 * 3600
_BOX = re.compile(r"\\boxed(?![A-Za-z])\s*")
_FRAME = re.compile(r"\\fbox(?![A-Za-z])\s*")
_END_OF_FORMULA = re.compile(r"[$\n]|\\[])]")


def pluralize(number: int, noun: str) -> str:
    """Return the number with its noun: "1 rank", "2 ranks", "2 batches"."""
    ending = "" if number == 1 else "es" if noun.endswith("ch") else "s"
    return f"{number} {noun}{ending}"


def from_here(path: Path) -> str:
    """Return a hint for a missing path below the current directory, and "" for other paths."""
    return " (relative paths begin at the current directory)" if path.is_relative_to(Path.cwd()) else ""


def memory_text(nbytes: float) -> str:
    """Format memory, at most in GiB, the unit of ``cluster.gpu_memory_gib`` and ``host_memory_gib``."""
    return _scale(nbytes, 1024, ("B", "KiB", "MiB", "GiB"))


def traffic_text(nbytes: float) -> str:
    return _scale(nbytes, 1000, ("B", "kB", "MB", "GB", "TB", "PB"))


def seconds_text(seconds: float) -> str:
    if seconds >= _HOURS_FROM_S:
        return f"{significant(seconds / 3600)} h"
    return _scale(seconds * 1e6, 1000, ("us", "ms", "s")) if seconds else "0 s"


def _scale(value: float, step: int, units: tuple[str, ...]) -> str:
    index, size = 0, abs(value)
    while index < len(units) - 1 and size >= 0.9995 * step:
        index, size = index + 1, size / step
    sign = "-" if value < 0 else ""
    return f"{sign}{significant(size)} {units[index]}"


def significant(value: float) -> str:
    """Format three significant digits; from 100 on, an integer with a comma per thousand."""
    if not value:
        return "0"
    rounded = float(f"{value:.3g}")
    decimals = 2 - math.floor(math.log10(abs(rounded)))
    return f"{value:,.{max(0, decimals)}f}"


def extract_boxed(text: str) -> str | None:
    r"""Return the content of the last ``\boxed{}``, or else of the last ``\fbox{}``.

    Without braces (``$\boxed 9$``), it ends with the formula or line. ``None`` if there is no closed box.
    """
    boxes = list(_BOX.finditer(text)) or list(_FRAME.finditer(text))
    if not boxes:
        return None
    begin = boxes[-1].end()
    if not text.startswith("{", begin):
        return _END_OF_FORMULA.split(text[begin:], maxsplit=1)[0].strip().removesuffix(".") or None
    depth = 0
    for place in range(begin, len(text)):
        depth += {"{": 1, "}": -1}.get(text[place], 0)
        if depth == 0:
            return text[begin + 1 : place].strip()
    return None
