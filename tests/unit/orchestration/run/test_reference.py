"""Refresh of the reference, its files, and its restoration from a checkpoint."""

import shutil
from pathlib import Path
from typing import cast

from slime_like.errors import CheckpointError
from slime_like.orchestration.rollout.roles import RoleQueue
from slime_like.orchestration.run.reference import REFERENCE, Reference
from slime_like.orchestration.trainer.checkpoint import Checkpoint, CheckpointStore
from slime_like.orchestration.trainer.model_ranks import ModelRanks
from tests.support.pending import OneRank
from tests.support.rejections import Rejects


class Trainers(OneRank):
    """Trainers whose policy is a number, which is also the content of a weight file."""

    def __init__(self) -> None:
        self.policy = 0
        self.reference = 0

    def save(self, directory: Path) -> None:
        directory.mkdir()

    def save_weights(self, directory: Path) -> None:
        directory.mkdir(parents=True)
        (directory / "weights").write_text(str(self.policy))

    def load_weights(self, directory: Path, role: str) -> None:
        assert role == "reference"
        self.reference = int((directory / "weights").read_text())


class Run:
    """Run that saves a checkpoint after each step."""

    def __init__(self, run_dir: Path, interval: int = 2, has_workers: bool = False) -> None:
        self.trainers = Trainers()
        self.pool = RoleQueue("reference", 16) if has_workers else None
        trainers = cast(ModelRanks, self.trainers)
        self.reference = Reference(run_dir, interval, trainers, [] if self.pool is None else [self.pool])
        self.store = CheckpointStore(run_dir, 2, [trainers], print)
        self.store.linked[REFERENCE] = self.reference.files

    def step(self, step: int) -> Checkpoint:
        self.trainers.policy = step
        self.reference.refresh(step)
        return Checkpoint.read(self.store.save(step, self.reference.state_dict()))


def test_a_resumed_run_has_the_reference_of_its_checkpoint(tmp_path: Path) -> None:
    """The reference is from step 2, although the killed run continued to step 4. Another directory works, too."""
    first = Run(tmp_path / "run")
    checkpoint = [first.step(step) for step in (2, 3)][-1]
    first.reference.refresh(4)
    for directory in (tmp_path / "run", tmp_path / "other"):
        resumed = Run(directory)
        resumed.reference.restore(checkpoint)
        assert resumed.reference.step == 2
        assert resumed.trainers.reference == 2
        assert [path.name for path in (directory / REFERENCE).iterdir()] == ["step-000002"]
        (again := resumed.step(3)) and resumed.step(4)
        assert (again.path / REFERENCE / "weights").read_text() == "2" and resumed.trainers.reference == 4


def test_a_checkpoint_without_its_reference_is_rejected(tmp_path: Path, rejects: Rejects) -> None:
    checkpoint = Run(tmp_path).step(2)
    shutil.rmtree(checkpoint.path / REFERENCE)
    with rejects(CheckpointError, "checkpoint-incomplete"):
        Run(tmp_path).reference.restore(checkpoint)


def test_workers_get_the_files_and_files_in_use_stay(tmp_path: Path) -> None:
    run = Run(tmp_path, interval=1, has_workers=True)
    assert run.pool is not None
    run.step(1)
    with run.pool._reading() as reading:
        assert reading == tmp_path / REFERENCE / "step-000001"
        run.step(2)
        assert reading.is_dir()
    run.step(3)
    with run.pool._reading() as reading:
        assert reading == tmp_path / REFERENCE / "step-000003"
    assert sorted(path.name for path in (tmp_path / REFERENCE).iterdir()) == ["step-000003"]
    assert run.trainers.reference == 0
