"""Counts in sentences."""

from slime_like.system.words import counted


def test_a_noun_fits_its_number() -> None:
    assert [counted(number, "row") for number in (0, 1, 2, 11)] == ["0 rows", "1 row", "2 rows", "11 rows"]
