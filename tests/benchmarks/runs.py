"""Runs whose phases are known."""

import dataclasses
from collections.abc import Iterable
from pathlib import Path

from slime_like.config import LoggingConfig
from slime_like.observability.metrics import MetricLogger
from slime_like.observability.names import step_metrics
from slime_like.observability.phases import PhaseTimes
from tests.unit.observability.records import rl_record


def write_run(run_dir: Path, steps: Iterable[tuple[float, float]]) -> Path:
    """A step per (seconds of training, of orchestration); the mean response length of step n is n + 1."""
    logger = MetricLogger(LoggingConfig(tensorboard=False), run_dir)
    for step, (train_s, orchestration_s) in enumerate(steps, start=1):
        phases = dict.fromkeys(rl_record().times.seconds, 0.0) | {"train": train_s}
        times = PhaseTimes(step_s=train_s + orchestration_s, seconds=phases, orchestration_s=orchestration_s)
        record = dataclasses.replace(rl_record(), times=times, response_lengths=[step, step + 2])
        logger.log(step, step_metrics(record))
        logger.log(step, {"evaluation/accuracy": 0.5})  # a record that is no training step
    logger.close()
    return run_dir
