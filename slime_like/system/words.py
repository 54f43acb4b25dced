"""Counts in sentences."""


def counted(number: int, noun: str) -> str:
    """The number with its noun: "1 rank", "2 ranks"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
