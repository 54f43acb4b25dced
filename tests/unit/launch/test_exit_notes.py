"""Notes of nodes that end before Ray connects them. The nodes that wait for such a node end with it."""

import os
import time
from pathlib import Path

import pytest

from slime_like.config.launch import LaunchOptions
from slime_like.launch.commands import ExitNotes, NodeEndedError, RunVerdict


def notes(tmp_path: Path, rank: int, silence_s: float = 30, nodes_timeout_s: float = 600) -> ExitNotes:
    options = LaunchOptions(None, (), 2, rank, head="127.0.0.2", silence_s=silence_s, nodes_timeout_s=nodes_timeout_s)
    return ExitNotes(tmp_path / "run", options)


def sentence_of(waiting: ExitNotes, rank: int = 0) -> str:
    with pytest.raises(NodeEndedError) as ended:
        waiting.require_none_ended([rank])
    return ended.value.verdict.sentence


def test_a_note_of_an_earlier_start_waits_for_the_node_to_return(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes(tmp_path, 0).leave(RunVerdict(2, "no model"))
    notes(tmp_path, 1).require_none_ended()
    impatient, note = notes(tmp_path, 1, silence_s=1e-9), tmp_path / ".run.cluster" / "ended-0.json"
    left_at = note.stat().st_mtime
    monkeypatch.setattr(time, "time", lambda: left_at + 5)
    assert sentence_of(impatient) == "node 0 ended 5 s ago and was not restarted: no model"
    os.utime(note, (left_at - 3600, left_at - 3600))
    notes(tmp_path, 1, silence_s=1e-9).require_none_ended()  # too old to count
    again = notes(tmp_path, 0)
    impatient.require_none_ended()  # the node has returned
    again.leave(RunVerdict(1, "busy port"))
    assert sentence_of(impatient) == "busy port"


def test_a_note_that_cannot_be_read_still_counts(tmp_path: Path) -> None:
    waiting, path = notes(tmp_path, 0), tmp_path / ".run.cluster" / "ended-1.json"
    path.parent.mkdir()
    path.write_text("{")
    assert sentence_of(waiting, rank=1).startswith(f"node 1 has ended, and {path} does not say why")


def test_a_note_that_cannot_be_written_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / ".run.cluster").touch()
    notes(tmp_path, 0).leave(RunVerdict(1, "gone"))
    assert "ended-0.json cannot be written (File exists)" in capsys.readouterr().err
