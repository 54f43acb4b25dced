"""When a save counts, and what is on disk after each way in which it can end."""

import errno
import os
import shutil
from pathlib import Path
from typing import Any, cast
from unittest.mock import Mock

import pytest

from slime_like.errors import CheckpointError, ConfigError
from slime_like.orchestration.trainer.checkpoint import Checkpoint, CheckpointStore, newest_whole
from slime_like.orchestration.trainer.model_ranks import ModelRanks
from tests.support.pending import OneRank
from tests.support.rejections import Rejects


class Trainers(OneRank):
    """Trainers that finish writing when the test sets ``written``. ``failure`` is an error in the background."""

    def __init__(self) -> None:
        self.written = False
        self.failure: CheckpointError | None = None
        self._directory = Path()

    def save(self, directory: Path) -> None:
        self.start_save(directory)
        self.finish_save()

    def start_save(self, directory: Path) -> None:
        directory.mkdir()
        self._directory = directory

    def is_written(self) -> bool:
        if self.failure is not None:
            raise self.failure
        return self.written

    def finish_save(self) -> None:
        if self.failure is not None:
            raise self.failure
        (self._directory / "weights").write_text("whole")


def _store(root: Path, trainers: Trainers, keep: int = 2) -> CheckpointStore:
    return CheckpointStore(root, keep, [cast("ModelRanks", trainers)], print)


@pytest.fixture
def trainers() -> Trainers:
    return Trainers()


@pytest.fixture
def store(tmp_path: Path, trainers: Trainers) -> CheckpointStore:
    """Store with a saved step 1 and a started save of step 2."""
    store = _store(tmp_path, trainers)
    store.save(1, {})
    store.start(2, {})
    return store


def _found(root: Path) -> tuple[list[str], str | None]:
    """Return the directory entries without ``latest``, and the target of ``latest``."""
    checkpoints = root / "checkpoints"
    latest = checkpoints / "latest"
    names = sorted(path.name for path in checkpoints.iterdir() if path.name != "latest")
    return names, str(latest.readlink()) if latest.is_symlink() else None


def test_a_started_save_counts_and_replaces_older_ones_when_every_rank_has_written(
    tmp_path: Path, trainers: Trainers
) -> None:
    store = _store(tmp_path, trainers, keep=1)
    store.save(1, {})
    state: dict[str, Any] = {"data": {"position": 7}}
    store.start(3, state)
    state["data"]["position"] = 8  # training continues
    assert store.commit_written() is None
    assert _found(tmp_path) == ([".partial-step-000003", "step-000001"], "step-000001")
    trainers.written = True
    assert store.commit_written() == tmp_path / "checkpoints" / "step-000003"
    assert _found(tmp_path) == (["step-000003"], "step-000003")
    checkpoint = Checkpoint.read(tmp_path / "checkpoints" / "latest")
    assert checkpoint.step == 3 and checkpoint.data_position() == {"position": 7}
    assert (checkpoint.model("trainer") / "weights").read_text() == "whole"
    assert store.commit_written() is None and store.finish() is None
    store.start(4, {})
    assert store.finish() == tmp_path / "checkpoints" / "step-000004"
    assert _found(tmp_path) == (["step-000004"], "step-000004")


def test_a_run_resumed_from_an_older_step_keeps_its_own_checkpoints(tmp_path: Path) -> None:
    """Later steps of the earlier start are removed first. A copy under another name stays."""
    for step in (10, 20, 30):
        _store(tmp_path, Trainers(), keep=3).save(step, {})
    (tmp_path / "checkpoints" / "step-000010-good").mkdir()
    store = _store(tmp_path, Trainers())  # `--resume .../step-000010 --checkpoint.every 1 --checkpoint.keep 2`
    store.save(11, {})
    assert _found(tmp_path) == (["step-000010", "step-000010-good", "step-000011"], "step-000011")
    assert Checkpoint.read(tmp_path / "checkpoints" / "latest").step == 11
    store.save(12, {})
    assert _found(tmp_path) == (["step-000010-good", "step-000011", "step-000012"], "step-000012")
    _store(tmp_path, Trainers()).save(1_000_000, {})
    assert _found(tmp_path)[0] == ["step-000010-good", "step-000012", "step-1000000"]


def test_milestones_are_kept_besides_the_newest(tmp_path: Path, trainers: Trainers) -> None:
    """Milestones that the run has abandoned are not."""
    for resumed, steps, kept in ((None, range(10, 80, 10), (30, 60, 70)), (40, (50, 60), (30, 60))):
        store = CheckpointStore(tmp_path, 1, [cast("ModelRanks", trainers)], print, resumed, keep_every=30)
        for step in steps:
            store.save(step, {})
        assert _found(tmp_path)[0] == [f"step-{step:06d}" for step in kept]


def test_what_another_rank_wrote_after_a_failed_save_is_removed_by_the_next(tmp_path: Path, trainers: Trainers) -> None:
    store = _store(tmp_path, trainers)
    (tmp_path / "checkpoints" / ".partial-step-000001" / "trainer").mkdir(parents=True)
    store.save(2, {})
    assert _found(tmp_path) == (["step-000002"], "step-000002")


@pytest.mark.parametrize("noticed_by", ["commit_written", "finish"])
def test_a_failure_in_the_background_keeps_the_last_checkpoint(
    tmp_path: Path, trainers: Trainers, store: CheckpointStore, noticed_by: str
) -> None:
    trainers.failure = CheckpointError("the disk is full")
    with pytest.raises(CheckpointError, match="the disk is full"):
        getattr(store, noticed_by)()
    assert _found(tmp_path) == (["step-000001"], "step-000001")
    store.rescue()
    store.abandon()
    assert _found(tmp_path) == (["step-000001"], "step-000001")


def test_a_full_disk_removes_the_save(tmp_path: Path, rejects: Rejects) -> None:
    def full(path: Path) -> None:
        Path("/dev/full").write_bytes(b"x")

    store = _store(tmp_path, Trainers())
    store.written["ledger.sqlite"] = full
    with rejects(CheckpointError, "disk-refused"):
        store.save(3, {})
    assert not (tmp_path / "checkpoints" / ".partial-step-000003").exists()


def test_a_damaged_checkpoint_is_removed_before_the_resumed_one(tmp_path: Path) -> None:
    """Step 260 is damaged, and the run resumes from step 250. The next save keeps 250 and itself."""
    for step in (250, 260):
        _store(tmp_path, Trainers()).save(step, {})
    store = CheckpointStore(tmp_path, 2, [cast("ModelRanks", Trainers())], print, resumed=250)
    store.save(300, {})
    assert _found(tmp_path) == (["step-000250", "step-000300"], "step-000300")
    store.save(310, {})
    assert _found(tmp_path) == (["step-000300", "step-000310"], "step-000310")


@pytest.mark.parametrize(("written", "failure"), [(True, None), (False, None), (True, CheckpointError("disk"))])
def test_a_failing_run_keeps_a_finished_save(
    tmp_path: Path, trainers: Trainers, store: CheckpointStore, written: bool, failure: CheckpointError | None
) -> None:
    trainers.written, trainers.failure = written, failure
    store.rescue()
    store.abandon()
    last = "step-000002" if written and failure is None else "step-000001"
    names, latest = _found(tmp_path)
    assert latest == last and names[-1] == last and not [name for name in names if name.startswith(".")]


def test_a_damaged_file_of_the_driver_is_rejected(tmp_path: Path, rejects: Rejects) -> None:
    store = _store(tmp_path, Trainers())
    store.written["ledger"] = lambda path: path.write_bytes(b"events")
    checkpoint = Checkpoint.read(store.save(1, {}))
    assert checkpoint.file("ledger").read_bytes() == b"events"
    (checkpoint.path / "ledger").write_bytes(b"evenTs")
    with rejects(CheckpointError, "checkpoint-damaged"):
        checkpoint.file("ledger")
    (checkpoint.path / "ledger").unlink()
    with rejects(CheckpointError, "checkpoint-incomplete"):
        checkpoint.file("ledger")


def test_a_failed_removal_is_noted_and_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    notes: list[str] = []
    store = CheckpointStore(tmp_path, 1, [cast("ModelRanks", Trainers())], notes.append)
    store.save(1, {})
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", Mock(side_effect=OSError(errno.EBUSY, os.strerror(errno.EBUSY))))
        store.save(2, {})
    names, latest = _found(tmp_path)
    assert latest == "step-000002" and names[1:] == ["step-000002"] and names[0].startswith(".removed-")
    assert len(notes) == 1 and names[0] in notes[0] and os.strerror(errno.EBUSY) in notes[0]
    store.save(3, {})
    assert _found(tmp_path) == (["step-000003"], "step-000003") and len(notes) == 1


@pytest.mark.parametrize("moved", [".former-step-000001", ".removed-1-step-000001"])
def test_a_kill_while_a_step_is_replaced(tmp_path: Path, moved: str) -> None:
    """The former checkpoint gets its name back. A half-removed one is never read."""
    store = _store(tmp_path, Trainers(), keep=1)
    path = store.save(1, {"start": 1})
    path.rename(path.with_name(moved))
    found = newest_whole(tmp_path) if moved.startswith(".former") else None
    assert found is None or found.state["start"] == 1
    _store(tmp_path, Trainers(), keep=1).save(1, {"start": 2})
    assert _found(tmp_path) == (["step-000001"], "step-000001")
    assert Checkpoint.read(path).state["start"] == 2


def test_a_state_that_is_a_pipe_and_a_link_to_itself(tmp_path: Path, rejects: Rejects) -> None:
    root = tmp_path / "checkpoints"
    (root / "step-000001").mkdir(parents=True)
    os.mkfifo(root / "step-000001" / "state.json")
    (root / "latest").symlink_to("latest")
    for path in (root / "step-000001", root / "latest"):
        with rejects(CheckpointError, "no-checkpoint"):
            Checkpoint.read(path)
    with rejects(ConfigError, "no-whole-checkpoint"):
        newest_whole(tmp_path)
