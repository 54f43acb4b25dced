"""Pages that are made from the configuration's models and from docstrings."""

from pathlib import Path

import pytest

from slime_like.commands.reference import reference_text
from slime_like.commands.rewards_page import rewards_text

DOCS = Path(__file__).parents[3] / "docs"


@pytest.mark.parametrize(("page", "text"), [("configuration", reference_text), ("rewards", rewards_text)])
def test_generated_pages_are_current(page: str, text: object) -> None:
    assert callable(text)
    assert (DOCS / f"{page}.md").read_text() == text(), "run: python -m slime_like.commands.reference"
