"""Parts of sentences: counts, and where a path begins."""

from pathlib import Path


def counted(number: int, noun: str) -> str:
    """The number with its noun: "1 rank", "2 ranks"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def from_here(path: Path) -> str:
    """What stands behind a path below the current directory that does not exist; "" behind another."""
    return " (relative paths begin at the current directory)" if path.is_relative_to(Path.cwd()) else ""
