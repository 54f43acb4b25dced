"""What is kept for capsules, and which capsules are written: steps, intervals, resumes, alarms and bounds."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from slime_like.config import RunConfig
from slime_like.config.reading.load import load_config
from slime_like.data.dump import load_trajectories
from slime_like.errors import ConfigError
from slime_like.orchestration.run.capsules import Capsules
from slime_like.orchestration.run.sources import Run
from slime_like.orchestration.run.step import TrainedStep
from slime_like.orchestration.trainer.batcher import PackTokens
from slime_like.orchestration.trainer.checkpoint import Checkpoint, CheckpointStore
from slime_like.trajectory import ScoredTrajectory
from slime_like.weights.fingerprint import Fingerprint
from tests.support.pending import OneRank
from tests.support.rejections import Rejects


class Policy(OneRank):
    """A policy whose weight is the number of its steps."""

    role = SimpleNamespace(trained=True)
    weight = 0

    def devices(self) -> list[str]:
        return [""]

    def save(self, directory: Path) -> None:
        directory.mkdir()
        (directory / "weights").write_text(str(self.weight))

    def fingerprints(self) -> dict[str, Fingerprint]:
        return {"weight": Fingerprint.of(torch.tensor([float(self.weight)]))}

    def stored_scores(self, rows: Any, *fields: str) -> Any:
        return {row.sequence_id: {"old_logprobs": torch.full((2,), -1.0)} for row in rows}

    def score(self, rows: Any) -> Any:
        return [{"old_logprobs": torch.full((2,), -float(self.weight))} for _ in rows]


class Training:
    """A run that trains one row a step, and saves every third step."""

    def __init__(self, run_dir: Path, finished: int, *flags: str) -> None:
        given = ["--run_dir", str(run_dir), "--model.path", "none", "--checkpoint.every", "3", "--steps", "12", *flags]
        self.config: RunConfig = load_config(None, given)
        self.policy, self.notes, self.step = Policy(), list[str](), finished
        self.policy.weight = finished
        self.checkpoints = CheckpointStore(run_dir, 1, [cast(Any, self.policy)], self.notes.append, finished)
        if finished:
            self.checkpoints.newest = Checkpoint.read(run_dir / "checkpoints" / f"step-{finished:06d}")
        run = SimpleNamespace(
            config=self.config,
            finished_steps=finished,
            policy=self.policy,
            models={"policy": self.policy},
            devices=SimpleNamespace(training=lambda keep_weights: None),
            checkpoints=self.checkpoints,
            progress=SimpleNamespace(note=self.notes.append),
        )
        self.capsules = Capsules(cast(Run, run))

    def until(self, last: int, *alarmed: int) -> None:
        for step in range(self.step + 1, last + 1):
            ids = torch.arange(2)
            row = ScoredTrajectory.unrewarded(f"{step}-0", ids, ids, group_id=step)
            given = [torch.full((2,), 0.5)]
            row.advantages = torch.zeros(2)  # as a KL penalty replaces them
            self.policy.weight = step
            trained = TrainedStep([row], [], {}, PackTokens(), given_advantages=given)
            self.capsules.record(step, trained, step in alarmed)
            if step % 3 == 0:
                self.checkpoints.save(step, {})
        self.step = last


def written(run_dir: Path) -> list[str]:
    return sorted(path.name for path in (run_dir / "capsules").iterdir() if not path.name.startswith(".recent"))


def names(path: Path) -> list[int]:
    return sorted(int(file.stem.removeprefix("step-")) for file in path.iterdir())


def test_a_capsule_holds_the_checkpoint_before_it_and_all_batches_since(tmp_path: Path) -> None:
    training = Training(tmp_path, 0, "--debug.capsule", "[2,5,9]")
    training.until(12)
    assert written(tmp_path) == ["step-000002", "step-000005", "step-000009"]
    for step, base in ((2, 0), (5, 3), (9, 6)):
        path = tmp_path / "capsules" / f"step-{step:06d}"
        facts = json.loads((path / "capsule.json").read_text())
        assert (facts["step"], facts["base"], facts["machine"]["device"]) == (step, base, "cpu")
        assert names(path / "rollouts") == list(range(base + 1, step + 1))
        records = {each: json.loads((path / "records" / f"step-{each:06d}.json").read_text())
                   for each in names(path / "records")}  # fmt: skip
        assert [*records] == list(range(base, step + 1))
        hashed = {each: record["weights"]["trainer"] for each, record in records.items() if "weights" in record}
        assert {each: found["weight"]["norm"] for each, found in hashed.items()} == {
            each: each for each in sorted({base, step - 1, step})
        }
        assert names(path / "checkpoints") == [base] if base else not (path / "checkpoints").exists()
        assert load_config(path / "config.yaml") == training.config
        (row,) = load_trajectories(path / "rollouts" / f"step-{step:06d}.pt")
        assert (row.sequence_id, row.advantages.tolist()) == (f"{step}-0", [0.5, 0.5])
        tokens = torch.load(path / "tokens.pt", weights_only=True)
        assert tokens["old_logprobs", f"{step}-0"].tolist() == [-1.0, -1.0]
        assert tokens["after.old_logprobs", f"{step}-0"].tolist() == [-step, -step]
    links = (
        (tmp_path / "capsules" / "step-000009" / "checkpoints" / "step-000006" / "trainer" / "weights").stat().st_nlink
    )
    assert links == 1  # the run has removed its own checkpoint
    assert not any((tmp_path / "capsules" / ".recent").rglob("*.pt"))


def test_only_needed_batches_are_kept(tmp_path: Path) -> None:
    training = Training(tmp_path, 0, "--debug.capsule", "[8]")
    recent = tmp_path / "capsules" / ".recent"
    training.until(5)
    assert not recent.exists()
    training.until(7)
    assert (names(recent / "rollouts"), names(recent / "records")) == ([7], [6, 7])


def test_alarms_write_capsules_and_the_oldest_are_removed(tmp_path: Path) -> None:
    training = Training(tmp_path, 0, "--debug.capsule", "[health,4]", "--debug.keep_capsules", "2")
    training.until(12, 2, 8, 11)
    assert written(tmp_path) == ["step-000008", "step-000011"]
    assert names(tmp_path / "capsules" / "step-000011" / "rollouts") == [10, 11]
    assert names(tmp_path / "capsules" / ".recent" / "rollouts") == [10, 11, 12]


def test_a_resumed_run_forgets_later_steps(tmp_path: Path) -> None:
    Training(tmp_path, 0, "--debug.capsule", "[5]").until(4)
    resumed = Training(tmp_path, 3, "--debug.capsule", "[5]")
    assert names(tmp_path / "capsules" / ".recent" / "rollouts") == []
    resumed.until(5)
    assert names(tmp_path / "capsules" / "step-000005" / "rollouts") == [4, 5]


def test_a_missing_batch_is_noted(tmp_path: Path) -> None:
    """Only steps since the checkpoint that was due are kept, but it was not written."""
    Training(tmp_path, 0).until(3)
    training = Training(tmp_path, 3, "--debug.capsule", "[8]")
    training.checkpoints.save = lambda *_: tmp_path  # type: ignore[method-assign]
    training.until(8)
    assert written(tmp_path) == []
    assert training.notes[-1].startswith("no capsule of step 8: the batch of step-000004 was not kept")


@pytest.mark.parametrize(
    "flags", ["--debug.capsule [13]", "--debug.capsule [0]", "--debug.capsule [health] --checkpoint.every 0",
              "--debug.capsule [1] --debug.shuffle_advantages true"]
)  # fmt: skip
def test_capsules_that_cannot_be_written_are_rejected(flags: str, tmp_path: Path, rejects: Rejects) -> None:
    given = ["--run_dir", str(tmp_path), "--model.path", "none", "--steps", "12", *flags.split()]
    with rejects(ConfigError, "fields-conflict"):
        load_config(None, given)
