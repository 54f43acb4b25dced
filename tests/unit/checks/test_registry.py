"""The registry of checks."""

import re
from pathlib import Path

from slime_like import checks
from slime_like.checks.check import CHECKS


def test_codes_are_unique() -> None:
    codes = [own.code for own in CHECKS]
    assert len(codes) == len(set(codes))


def test_every_check_is_used() -> None:
    """Each public ``*_problems`` of the package occurs outside its definition."""
    (folder,) = map(Path, checks.__path__)
    text = "".join(file.read_text(encoding="utf-8") for file in folder.glob("*.py"))
    defined = re.findall(r"^def ([a-z]\w*_problems)", text, re.MULTILINE)
    assert [name for name in defined if len(re.findall(rf"\b{name}\b", text)) < 2] == []
