"""Files that are written completely or not at all."""

from pathlib import Path

import pytest

from slime_like.system.disk import whole_file


def test_a_file_appears_whole_or_not_at_all_and_links_are_followed(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    target, link = tmp_path / "there" / "out.jsonl", tmp_path / "out.jsonl"
    target.write_text("earlier")
    link.symlink_to(target)
    with pytest.raises(KeyboardInterrupt), whole_file(link) as file:
        file.write("half")
        raise KeyboardInterrupt
    assert target.read_text() == "earlier"
    with whole_file(link) as file:
        file.write("whole")
        assert target.read_text() == "earlier"
    assert link.is_symlink() and target.read_text() == "whole"
    assert list(target.parent.iterdir()) == [target]
