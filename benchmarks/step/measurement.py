"""Measurements of one system's steady steps."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, median
from typing import Any

from slime_like.errors import DataError
from slime_like.observability.metrics import read_metrics
from slime_like.observability.names import STEP_TIME, phase_seconds
from slime_like.observability.phases import PHASES

PARTS = (*(phase for phase in PHASES if phase != "wait"), "orchestration")
"""The phases of one of our steps; nothing waits for data in this benchmark."""

_LENGTH = "rollout/response_length_mean"


@dataclass(frozen=True, slots=True)
class Measurement:
    """Steady steps of one system under one workload.

    Attributes:
        num_steps: steps measured.
        step_s: median seconds per step.
        response_length: mean tokens per response, over all measured steps.
        parts: median seconds of every phase; empty if the system does not report phases.
    """

    num_steps: int
    step_s: float
    response_length: float
    parts: dict[str, float] = field(default_factory=dict)


def from_run(run_dir: Path, warmup_steps: int) -> Measurement:
    """Read one of our run directories.

    Raises:
        DataError: no step is left, or a step lacks a figure.
    """
    path = run_dir / "metrics.jsonl"
    by_step = {record["step"]: record for record in read_metrics(path) if STEP_TIME in record}
    steady = _steady([by_step[step] for step in sorted(by_step)], warmup_steps, path)
    return Measurement(
        num_steps=len(steady),
        step_s=median(_column(steady, STEP_TIME, path)),
        response_length=fmean(_column(steady, _LENGTH, path)),
        parts={part: median(_column(steady, phase_seconds(part), path)) for part in PARTS},
    )


def from_records(path: Path, warmup_steps: int) -> Measurement:
    """Read the other system's JSON lines, with ``step_s`` and ``response_length`` per step.

    Raises:
        DataError: no step is left, or a step lacks a figure.
    """
    records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    steady = _steady(records, warmup_steps, path)
    return Measurement(
        num_steps=len(steady),
        step_s=median(_column(steady, "step_s", path)),
        response_length=fmean(_column(steady, "response_length", path)),
    )


def _steady(records: Sequence[dict[str, Any]], warmup_steps: int, path: Path) -> list[dict[str, Any]]:
    if len(records) <= warmup_steps:
        problem = f"{len(records)} steps and {warmup_steps} for warming up leave none to time"
        raise DataError(problem, code="too-few-steps", who=str(path), remedy="run more steps")
    return list(records[warmup_steps:])


def _column(records: Sequence[Mapping[str, Any]], name: str, path: Path) -> list[float]:
    for line, record in enumerate(records, start=1):
        if record.get(name) is None:
            problem, remedy = f"timed step {line} has no {name}", "the run did not record what is compared here"
            raise DataError(problem, code="figure-missing", who=str(path), remedy=remedy)
    return [float(record[name]) for record in records]
