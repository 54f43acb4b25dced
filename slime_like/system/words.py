"""Parts of sentences."""

from pathlib import Path


def counted(number: int, noun: str) -> str:
    """Return the number with its noun: "1 rank", "2 ranks"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def from_here(path: Path) -> str:
    """Return a hint for a missing path below the current directory, and "" for other paths."""
    return " (relative paths begin at the current directory)" if path.is_relative_to(Path.cwd()) else ""
