"""Parts of sentences."""

from pathlib import Path


def counted(number: int, noun: str) -> str:
    """Return the number with its noun: "1 rank", "2 ranks", "2 batches"."""
    ending = "" if number == 1 else "es" if noun.endswith("ch") else "s"
    return f"{number} {noun}{ending}"


def from_here(path: Path) -> str:
    """Return a hint for a missing path below the current directory, and "" for other paths."""
    return " (relative paths begin at the current directory)" if path.is_relative_to(Path.cwd()) else ""
