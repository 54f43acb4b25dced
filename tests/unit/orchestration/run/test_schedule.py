"""After which steps evaluation, checkpoints, tables and memory figures are due."""

from collections.abc import Callable
from pathlib import Path

import pytest

from slime_like.config import RunConfig
from slime_like.orchestration.run.schedule import Schedule

CASES = {
    "every three, and the last": ({"evaluation": {"every": 3}}, Schedule.evaluates, [3, 6, 9, 10]),
    "the last alone": ({"evaluation": {"every": 0}}, Schedule.evaluates, [10]),
    "checkpoints": ({"checkpoint": {"every": 5}}, Schedule.saves, [5, 10]),
    "tables, from the first": ({"debug": {"tables_every": 4}}, Schedule.shows_tables, [1, 4, 8]),
    "no tables": ({"debug": {"samples_per_step": 0, "tables_every": 4}}, Schedule.shows_tables, []),
    "memory": ({}, Schedule.measures_memory, [1]),
}


@pytest.mark.parametrize(("settings", "is_due", "steps"), CASES.values(), ids=CASES)
def test_steps(settings: dict[str, object], is_due: Callable[[Schedule, int], bool], steps: list[int]) -> None:
    config = RunConfig.model_validate(
        {"run_dir": Path("run"), "model": {"path": Path("model")}, "steps": 10, **settings}
    )
    schedule = Schedule(config)
    assert [step for step in range(1, 11) if is_due(schedule, step)] == steps
