"""Counts in sentences."""


def counted(number: int, noun: str, plural: str = "") -> str:
    """The number with its noun: "1 rank", "2 ranks"; ``plural`` where that does not end in "s" alone."""
    return f"{number} {noun if number == 1 else plural or noun + 's'}"
