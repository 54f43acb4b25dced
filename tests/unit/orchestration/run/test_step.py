"""Warnings and time of a step's record, and steps that are milestones."""

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

from slime_like import train as module
from slime_like.config.reading.load import load_config
from slime_like.observability.health import EVENTS_FILE
from slime_like.observability.metrics import read_lines
from slime_like.observability.timing import PhaseClock
from slime_like.orchestration.run.milestones import is_due
from slime_like.orchestration.run.recorder import StepRecorder
from slime_like.orchestration.run.sources import Source
from slime_like.orchestration.run.step import TrainedStep
from slime_like.orchestration.trainer.batcher import PackTokens
from slime_like.trajectory import ScoredTrajectory
from tests.unit.observability.records import grpo_stats, phase_times
from tests.unit.observability.report_run import sample

MODEL = Path(__file__).parents[4] / "configs" / "models" / "Qwen2.5-0.5B"


def group(step: int, advantage: float) -> list[ScoredTrajectory]:
    trajectories = [sample(step, index) for index in range(2)]
    for trajectory, sign in zip(trajectories, (1.0, -1.0), strict=True):
        trajectory.advantages = torch.tensor([sign * advantage])
    return trajectories


def test_steps_with_equal_rewards_are_reported_once(tmp_path: Path) -> None:
    flags = ["--run_dir", str(tmp_path), "--model.path", str(MODEL), "--debug.samples_per_step", "0"]
    flags += ["--health.stop_on", "[no_gradient]"]
    notes: list[str] = []
    run: Any = SimpleNamespace(
        config=load_config(None, flags),
        finished_steps=0,
        source=Source(),
        policy=SimpleNamespace(peak_memory_bytes=lambda: {}),
        metrics=SimpleNamespace(log=lambda step, metrics: None),
        progress=SimpleNamespace(note=notes.append, update=lambda step, metrics: None),
    )
    recording = StepRecorder(run)
    for step, advantage in enumerate([0.5, 0, 0, 0, 0, 0.5, 0, 0, 0, 0, 0, 0, 0], start=1):
        recording.record(
            step, TrainedStep(group(step, advantage), [grpo_stats()], {}, PackTokens(16, 0)), phase_times()
        )
    (note,) = notes
    assert note.startswith("step 11, warning of health.no_gradient: in 5 steps in a row, every advantage was 0")
    (event,) = [row for _, row in read_lines(tmp_path / EVENTS_FILE)]
    assert (event["step"], event["rule"], event["value"], event["threshold"]) == (11, "no_gradient", 5, 5)
    assert recording.alarms.stop is not None and recording.alarms.stop.step == 11


@pytest.mark.parametrize(("every", "steps"), [(3, [3, 6, 9, 10]), (0, [10]), (5, [5, 10])])
def test_milestones(every: int, steps: list[int]) -> None:
    assert [step for step in range(1, 11) if is_due(step, every, last=10)] == steps


def test_the_time_of_records_and_milestones_belongs_to_no_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now_s, recorded, run = 0, list[float](), MagicMock(finished_steps=0)

    def spend(seconds: int) -> None:
        nonlocal now_s
        now_s += seconds

    def record(step: int, trained: object, times: dict[str, float]) -> None:
        spend(100)
        recorded.append(sum(times.values()))

    monkeypatch.setattr(module, "open_run", lambda _: nullcontext(run))
    monkeypatch.setattr(module, "PhaseClock", lambda: PhaseClock(lambda: now_s * 10**9))
    monkeypatch.setattr(module, "StepRecorder", lambda _: nullcontext(SimpleNamespace(record=record)))
    milestones = SimpleNamespace(
        before_first=lambda: spend(10), after=lambda _: spend(1000), finish=lambda wall_s: None
    )
    monkeypatch.setattr(module, "Milestones", lambda *_: milestones)
    monkeypatch.setattr(module, "train_on_batch", lambda *_: spend(1) or MagicMock())
    module.train(load_config(None, ["--run_dir", str(tmp_path), "--model.path", str(tmp_path), "--steps", "3"]))
    assert recorded == [1.0, 1.0, 1.0]
