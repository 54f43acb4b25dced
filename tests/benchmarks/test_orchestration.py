"""The report on a run whose phases are known."""

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.orchestration import format_report, main, phase_report
from slime_like.config import LoggingConfig
from slime_like.errors import DataError
from slime_like.observability.metrics import MetricLogger
from slime_like.observability.names import step_metrics
from slime_like.observability.phases import PhaseTimes
from tests.unit.observability.records import rl_record

REPO = Path(__file__).parents[2]


def write_run(run_dir: Path, orchestration: list[float]) -> Path:
    """One step per entry: a second of training and so much orchestration."""
    logger = MetricLogger(LoggingConfig(tensorboard=False), run_dir)
    for step, seconds in enumerate(orchestration, start=1):
        phases = dict.fromkeys(rl_record().times.seconds, 0.0) | {"train": 1.0}
        times = PhaseTimes(step_s=1.0 + seconds, seconds=phases, orchestration_s=seconds)
        logger.log(step, step_metrics(dataclasses.replace(rl_record(), times=times)))
        logger.log(step, {"evaluation/accuracy": 0.5})  # a record that is no training step
    logger.close()
    return run_dir


def test_the_first_steps_are_skipped(tmp_path: Path) -> None:
    report = phase_report(write_run(tmp_path, [100.0] * 5 + [0.25, 0.75]) / "metrics.jsonl")
    assert (report.num_steps, report.step_s) == (2, 1.5)
    assert report.seconds["train"] == 1.0 and report.seconds["orchestration"] == 0.5
    assert report.share("orchestration") == pytest.approx(100 / 3)
    assert sum(report.seconds.values()) == pytest.approx(report.step_s)
    assert "orchestration takes 33.33% of step time, over 2 steady steps" in format_report(report)


def test_the_command_prints_the_table(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.orchestration", str(write_run(tmp_path, [0.0, 1.0])), "--skip", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True, cwd=REPO)
    assert [
        line.split() for line in done.stdout.splitlines() if line.startswith(("train", "orchestration  ", "step"))
    ] == [
        ["train", "1.0000", "50.00%"],
        ["orchestration", "1.0000", "50.00%"],
        ["step", "2.0000", "100.00%"],
    ]


def test_too_short_a_run_is_refused(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path, [0.1] * 5)
    with pytest.raises(DataError, match="5 training steps and 5 skipped leave none"):
        phase_report(run_dir / "metrics.jsonl")
    with pytest.raises(SystemExit, match=r"error: .*leave none"):
        main([str(run_dir)])


def test_a_step_without_phases_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "train_actor_performance/total_step_time (s)": 1.0}\n')
    with pytest.raises(DataError, match=r"step 1 has no phases/wait \(s\)"):
        phase_report(path, skip=0)
