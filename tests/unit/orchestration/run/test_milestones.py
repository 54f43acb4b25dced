"""The summary of a run, and its saves on a full disk."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import pytest

from slime_like.config import RunConfig
from slime_like.errors import CheckpointError
from slime_like.observability.names import ACCURACY
from slime_like.orchestration.run.milestones import Milestones, accuracy_change

if TYPE_CHECKING:
    from collections.abc import Collection

    from slime_like.orchestration.run.recorder import StepRecorder
    from slime_like.orchestration.run.sources import Run


@pytest.mark.parametrize(
    ("steps", "comparable", "expected"),
    [
        ([0, 3, 6], True, (0.0, 0.6)),
        ([0], True, (0.0, 0.0)),
        ([0, 3], False, (None, 0.3)),
        ([6], True, (None, 0.6)),  # the run began with another run's checkpoint
        ([], True, (None, None)),
    ],
)
def test_accuracy_before_is_that_of_step_0(
    steps: list[int], comparable: bool, expected: tuple[float | None, float | None]
) -> None:
    records = [{"step": step, ACCURACY: step / 10} for step in steps]
    assert accuracy_change(records, comparable) == expected


class _Store:
    """Checkpoints whose saves the disk refuses at the steps in ``refused``."""

    def __init__(self, refused: Collection[int], code: str) -> None:
        self.refused, self.code, self.saved, self.started = refused, code, list[int](), 0

    def save(self, step: int, state: object) -> Path:
        if step in self.refused:
            raise CheckpointError("no space", code=self.code)
        self.saved.append(step)
        return Path(f"step-{step:06d}")

    def start(self, step: int, state: object) -> None:
        self.started = step

    def finish(self) -> Path | None:
        step, self.started = self.started, 0
        return self.save(step, {}) if step else None

    commit_written = finish


@pytest.mark.parametrize("async_save", [False, True])
@pytest.mark.parametrize(
    ("refused", "code", "saved"),
    [
        ((2, 3), "disk-refused", [1, 4, 5]),
        ((1, 2, 4), "failed-on-another-rank", [3, 5]),
        ((2, 3, 4), "write-refused", None),  # three in a row
        ((5,), "disk-refused", None),  # the last one
        ((2,), "save-timeout", None),
    ],
)
def test_a_full_disk_ends_a_run_only_at_its_last_save_or_the_third_time(
    tmp_path: Path, async_save: bool, refused: tuple[int, ...], code: str, saved: list[int] | None
) -> None:
    checkpoint = {"every": 1, "async_save": async_save, "export_hf": False}
    config = RunConfig(run_dir=tmp_path, model={"path": tmp_path}, steps=5, checkpoint=checkpoint)
    store, notes, part = _Store(refused, code), list[str](), SimpleNamespace(state_dict=dict)
    source = SimpleNamespace(state_dict=dict, evaluate=lambda *_: None)
    progress = SimpleNamespace(note=notes.append, waiting=lambda _: nullcontext())
    run = SimpleNamespace(
        config=config, checkpoints=store, progress=progress, source=source, reference=part, kl_reward=part,
        devices=SimpleNamespace(training=lambda keep_weights: None),
    )  # fmt: skip
    recorder = SimpleNamespace(alarms=SimpleNamespace(stop=None))
    milestones = Milestones(cast("Run", run), cast("StepRecorder", recorder))

    def train() -> None:
        for step in range(1, 6):
            milestones.after(step)
        milestones._finish_save(is_last=True)

    if saved is None:
        with pytest.raises(CheckpointError):
            train()
    else:
        train()
        assert store.saved == saved
        assert sum("the next save tries again" in note for note in notes) == len(refused)
