"""Counts in sentences."""

import pytest

from slime_like.system.words import counted


@pytest.mark.parametrize(
    ("number", "noun", "plural", "text"),
    [
        (0, "row", "", "0 rows"),
        (1, "row", "", "1 row"),
        (2, "row", "", "2 rows"),
        (2, "process", "processes", "2 processes"),
    ],
)
def test_a_noun_fits_its_number(number: int, noun: str, plural: str, text: str) -> None:
    assert counted(number, noun, plural) == text
