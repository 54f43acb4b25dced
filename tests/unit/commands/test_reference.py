"""Pages that are generated from the configuration's models and from docstrings."""

from pathlib import Path

import pytest

from slime_like.commands.reference import page_text


@pytest.mark.parametrize("page", ["configuration", "rewards"])
def test_generated_pages_are_current(page: str) -> None:
    path = Path(__file__).parents[3] / "docs" / f"{page}.md"
    assert path.read_text() == page_text(path), "run: python -m slime_like.commands.reference"
