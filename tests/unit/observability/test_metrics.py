"""Metrics on disk, read with plain json and TensorBoard's reader, and the clock of phases."""

import json
import math
import re
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock, call

import numpy as np
import pytest
import torch

from slime_like.config import LoggingConfig
from slime_like.errors import SlimeLikeError
from slime_like.observability.metrics import MetricLogger, read_metrics, running_mean, series
from slime_like.observability.timing import ORCHESTRATION, PHASES, PhaseClock
from tests.support.rejections import Rejects

FILE_ONLY = LoggingConfig(tensorboard=False)


def strict_lines(path: Path) -> list[dict[str, object]]:
    """Parse strict JSON, in which NaN and Infinity are errors."""

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


def test_a_line_is_on_disk_when_log_returns(tmp_path: Path) -> None:
    logger = MetricLogger(FILE_ONLY, tmp_path / "run")
    assert not (tmp_path / "run" / "tensorboard").exists()
    path = tmp_path / "run" / "metrics.jsonl"
    logger.log(0, {"evaluation/accuracy": 0.5})
    assert [(row["step"], row["evaluation/accuracy"]) for row in strict_lines(path)] == [(0, 0.5)]
    logger.log(1, {"a": 1, "b": 2.5})
    first, second = strict_lines(path)
    assert (second["step"], second["a"], second["b"]) == (1, 1.0, 2.5)
    assert isinstance(first["time"], float) and isinstance(second["time"], float)
    assert first["time"] <= second["time"]
    logger.close()
    logger.close()


def test_non_finite_values_become_null(tmp_path: Path) -> None:
    values: dict[str, Any] = {"nan": math.nan, "inf": np.float32(-np.inf)}
    values |= {"tensor": torch.tensor(math.inf), "fine": torch.tensor(0.5)}
    logger = MetricLogger(LoggingConfig(tensorboard=True), tmp_path)
    logger.log(1, values)
    logger.close()
    (row,) = strict_lines(tmp_path / "metrics.jsonl")
    assert {name: row[name] for name in values} == {"nan": None, "inf": None, "tensor": None, "fine": 0.5}


def test_full_disk(tmp_path: Path, rejects: Rejects) -> None:
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    logger = MetricLogger(FILE_ONLY, tmp_path)
    with rejects(SlimeLikeError, "disk-refused"):
        logger.log(1, {"loss": 1.0})
    logger.close()


@pytest.mark.parametrize(
    ("tail", "kept"), [("", [1, 3]), ('{"step": 2, "a"', [1, 3]), ('{"step": 2, "time": 0.0}', [1, 2, 3])]
)
def test_resumed_run_continues_after_the_last_whole_line(tmp_path: Path, tail: str, kept: list[int]) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "time": 0.0}\n' + tail)
    assert [row["step"] for row in read_metrics(path)] == kept[:-1]
    logger = MetricLogger(FILE_ONLY, tmp_path)
    logger.log(3, {"a": 1.0})
    logger.close()
    assert [row["step"] for row in strict_lines(path)] == kept


@pytest.mark.parametrize(
    ("logged", "expected"),
    [
        ([(2, 1.0), (3, None), (1, 5.0), (2, 4.0)], ([1, 2], [5.0, 4.0])),
        # Resumed from step 2 of 4: the earlier step 4 does not count.
        ([(1, 0.1), (2, 0.2), (3, 0.9), (4, 0.9), (3, 0.3)], ([1, 2, 3], [0.1, 0.2, 0.3])),
    ],
)
def test_series_of_repeated_steps_and_gaps(
    logged: list[tuple[int, float | None]], expected: tuple[list[int], list[float]]
) -> None:
    assert series([*({"step": step, "a": value} for step, value in logged), {"step": 9}], "a") == expected


def test_tensorboard_drops_repeated_steps(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for finished, steps, value in ((0, (1, 2, 3), 0.25), (1, (2, 3, 4), 0.5)):
        logger = MetricLogger(LoggingConfig(tensorboard=True), tmp_path, finished)
        for step in steps:
            logger.log(step, {"loss": value})
        logger.close()
        # Files are read in the order of their timestamps.
        for file in (tmp_path / "tensorboard").glob("events.out.tfevents.*"):
            file.rename(file.with_name(re.sub(r"tfevents\.\d+", f"tfevents.{finished:010}", file.name)))
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(1, 0.25), (2, 0.5), (3, 0.5), (4, 0.5)]


def test_tables_append_rows(tmp_path: Path, logger: MetricLogger) -> None:
    logger.log_table(
        1, "samples", [{"Prompt": "1+1=\n", "Logprobs": [-0.5, math.nan]}, {"Prompt": "ü", "Logprobs": [math.inf]}]
    )
    logger.log_table(2, "samples", [{"Prompt": "x", "Logprobs": []}])
    assert strict_lines(tmp_path / "tables" / "samples.jsonl") == [
        {"step": 1, "Prompt": "1+1=\n", "Logprobs": [-0.5, None]},
        {"step": 1, "Prompt": "ü", "Logprobs": [None]},
        {"step": 2, "Prompt": "x", "Logprobs": []},
    ]


def test_append_to_a_table_larger_than_memory(tmp_path: Path) -> None:
    table = tmp_path / "tables" / "samples.jsonl"
    table.parent.mkdir()
    with table.open("wb") as file:
        file.truncate(1 << 38)  # sparse
        file.seek(0, 2)
        file.write(b'\n{"step": 1}\n{"st')
    logger = MetricLogger(FILE_ONLY, tmp_path)
    logger.log_table(2, "samples", [{"a": 1}])
    logger.close()
    with table.open("rb") as file:
        file.seek(1 << 38)
        assert file.read() == b'\n{"step": 1}\n{"step": 2, "a": 1}\n'


def test_wandb_receives_settings_metrics_and_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = Mock()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    given: dict[str, Any] = {"project": "p", "entity": "team", "group": "g", "tags": ("a", "b")}
    settings = {f"wandb_{name}": value for name, value in given.items()}
    wandb.init.return_value.id = "a1b2"
    for known in (None, "a1b2"):  # a later start continues the run
        logger = MetricLogger(LoggingConfig(tensorboard=False, wandb=True, **settings), tmp_path / "mine")
        logger.log(1, {"loss": 0.5})
        logger.log_table(2, "samples", [{"Prompt": "1+1=", "Reward": 1.0}])
        logger.close()
        own = {"name": "mine", "dir": str(tmp_path / "mine"), "id": known, "resume": "allow"}
        wandb.init.assert_called_with(**given, **own)
        wandb.Table.assert_called_with(columns=["Prompt", "Reward"], data=[["1+1=", 1.0]])
        logged = [call({"loss": 0.5}, step=1), call({"samples": wandb.Table.return_value}, step=2)]
        assert wandb.init.return_value.log.call_args_list[-2:] == logged
        wandb.init.return_value.finish.assert_called()


def test_running_mean() -> None:
    values = np.random.default_rng(0).random(30)
    for window in (1, 3, 50):
        expected = [values[max(0, i + 1 - window) : i + 1].mean() for i in range(30)]
        assert running_mean(values.tolist(), window) == pytest.approx(expected, rel=1e-12)


def clock_at(*seconds: float) -> PhaseClock:
    """Return a clock that reads these times: at its start, at the begin and end of each phase, and at ``finish``."""
    return PhaseClock(iter([12_345 + round(moment * 1e9) for moment in seconds]).__next__)


def test_times_by_phase() -> None:
    clock = clock_at(0, 0.25, 2.25, 2.75, 3.75, 3.75, 4, 4, 4, 5, 5)
    for phase in ("generate", "train", "generate"):  # a repeated phase adds up
        with clock.phase(phase):
            pass
    times = {name: seconds for name, seconds in clock.finish().items() if seconds}
    assert times == {"generate": 2.25, "train": 1.0, "orchestration": 0.75}
    with clock.phase("wait"):
        pass
    assert clock.finish() == dict.fromkeys((*PHASES, ORCHESTRATION), 0.0) | {"wait": 1.0}


def test_errors_leave_the_clock_usable() -> None:
    clock = clock_at(0, 0, 2, 2, 3, 3)
    with pytest.raises(KeyError), clock.phase("score"):
        raise KeyError
    with clock.phase("train"), pytest.raises(RuntimeError), clock.phase("score"):
        pass
    seconds = clock.finish()
    assert (seconds["score"], seconds["train"]) == (2.0, 1.0)
