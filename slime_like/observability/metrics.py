"""Metrics on disk: JSON lines, read and written, and optionally TensorBoard and Weights & Biases."""

import json
import math
import mmap
import os
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from io import FileIO
from itertools import accumulate
from pathlib import Path
from typing import Any, Protocol

from slime_like.config import LoggingConfig
from slime_like.errors import DataError, SlimeLikeError
from slime_like.plugins.options import load_option
from slime_like.system.disk import refusal

METRICS_FILE, RESTARTS_FILE, REPORT_FILE, PROFILES = "metrics.jsonl", "restarts.jsonl", "report.html", "profiles"
TIMELINE_FILE = "timeline.jsonl"
WANDB_ID = "wandb_id"


class Tracker(Protocol):
    """Another place for metrics. See ``MetricLogger``."""

    def log(self, step: int, values: Mapping[str, float]) -> None: ...
    def log_table(self, step: int, name: str, rows: Sequence[Mapping[str, Any]]) -> None: ...
    def close(self) -> None: ...


class MetricLogger:
    """Logger that writes metrics to ``run_dir/metrics.jsonl`` and to the configured trackers.

    Each call appends one flushed line. A resumed run continues the file. Values that are not finite become ``null``.

    Args:
        finished_steps: steps of the checkpoint that the run resumes from. TensorBoard drops what an earlier start
            logged for later steps.

    Raises:
        SlimeLikeError: the disk rejects a write (from every method that writes).
    """

    def __init__(self, config: LoggingConfig, run_dir: Path, finished_steps: int = 0) -> None:
        self._run_dir = run_dir
        run_dir.mkdir(parents=True, exist_ok=True)
        self._trackers: list[Tracker] = []
        if config.wandb:  # first, because its start may fail
            self._trackers.append(load_option("wandb")(config, run_dir))
        if config.tensorboard:
            self._trackers.append(TensorBoardTracker(run_dir / "tensorboard", finished_steps))
        if config.prometheus_port:
            self._trackers.append(load_option("prometheus")(config.prometheus_port))
        self._file = open_for_append(run_dir / METRICS_FILE)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Record ``values`` at ``step``; several calls may share a step."""
        numbers = {name: float(value) for name, value in values.items()}
        write_lines(self._file, [{"step": step, "time": time.time(), **numbers}])
        for tracker in self._trackers:
            tracker.log(step, numbers)

    def log_table(self, step: int, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """Append ``rows`` to ``run_dir/tables/NAME.jsonl``, one object per row: ``step``, and the cells by column."""
        path = self._run_dir / "tables" / f"{name}.jsonl"
        path.parent.mkdir(exist_ok=True)
        with open_for_append(path) as file:
            write_lines(file, ({"step": step, **row} for row in rows))
        for tracker in self._trackers:
            tracker.log_table(step, name, rows)

    def close(self) -> None:
        """Close the file and the trackers. May be called twice."""
        self._file.close()
        trackers, self._trackers = self._trackers, []
        for tracker in trackers:
            tracker.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return all records of a metrics file, in order. Skips a truncated last line, which a killed run may leave.

    Raises ``DataError`` if the file is missing or damaged.
    """
    if not path.is_file():
        remedy = "give the directory of a run (its `run_dir`)"
        raise DataError("the file does not exist", code="no-metrics", who=str(path), remedy=remedy)
    records = []
    for number, record in read_lines(path):
        if wrong := [name for name, value in record.items() if not isinstance(value, int | float | None)]:
            problem, remedy = f"{wrong[0]} must be a number", "restore or remove the file"
            raise DataError(problem, code="damaged-line", who=f"{path}:{number}", remedy=remedy)
        records.append(record)
    return records


def series(records: Iterable[Mapping[str, Any]], name: str) -> tuple[list[int], list[float]]:
    """Return ascending steps and finite values of one metric. Repeated steps count as last logged."""
    by_step = {record["step"]: record[name] for record in current_records(records) if record.get(name) is not None}
    steps = sorted(by_step)
    return steps, [by_step[step] for step in steps]


def current_records(records: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Drop records of steps that a resumed run repeated."""
    kept: list[Mapping[str, Any]] = []
    for record in records:
        while kept and kept[-1]["step"] > record["step"]:
            kept.pop()
        kept.append(record)
    return kept


class TensorBoardTracker:
    """Tracker that writes scalars as TensorBoard event files in ``directory``. Tables are in the report."""

    def __init__(self, directory: Path, finished_steps: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        purged = {"purge_step": finished_steps + 1} if finished_steps else {}
        self._writer: Any = SummaryWriter(log_dir=str(directory), **purged)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def log_table(self, step: int, name: str, rows: Sequence[Mapping[str, Any]]) -> None: ...

    def close(self) -> None:
        self._writer.close()


def running_mean(values: list[float], window: int) -> list[float]:
    """Return the mean of each value and up to ``window - 1`` values before it."""
    sums = [0.0, *accumulate(values)]
    starts = [max(0, end - window) for end in range(1, len(sums))]
    return [(sums[end] - sums[start]) / (end - start) for end, start in enumerate(starts, start=1)]


def smoothing_window(num_steps: int) -> int:
    """Return the steps in the running mean: a tenth of the run, at least 3."""
    return max(3, num_steps // 10)


def read_lines(path: Path, newest: int | None = None) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the ``newest`` objects (by default all), each with its line number, from 1. Skips an unfinished last line.

    Raises ``DataError`` if one of these lines is finished, but is not a JSON object with a step.
    """
    lines = _lines(path) if newest is None else deque(_lines(path), maxlen=newest)
    for number, line in lines:
        record = _parse_object(line)
        if record is not None and isinstance(record.get("step"), int):
            yield number, record
        elif line.endswith(b"\n"):  # otherwise it is still being written
            problem, remedy = "the line is not a JSON object with a step", "restore or remove the file"
            raise DataError(problem, code="damaged-line", who=f"{path}:{number}", remedy=remedy)


def open_for_append(path: Path) -> FileIO:
    """Open at the end of the last whole line. Removes a half-written line, which a killed run may have left."""
    size = path.stat().st_size if path.is_file() else 0
    whole, last = 0, b""
    if size:
        with path.open("rb") as read, mmap.mmap(read.fileno(), 0, access=mmap.ACCESS_READ) as content:
            whole = content.rfind(b"\n") + 1
            last = content[whole:]
    ended = not last or _parse_object(last) is not None
    if not ended:
        os.truncate(path, whole)
    file = path.open("ab", buffering=0)  # with a buffer, closing would retry what a full disk rejected
    if ended and whole < size:
        file.write(b"\n")
    return file


def write_lines(file: FileIO, records: Iterable[Mapping[str, Any]]) -> None:
    """Append one line per record. Numbers that are not finite become ``null``.

    Raises ``SlimeLikeError`` if the disk rejects the write.
    """
    lines = (json.dumps(_finite(dict(record)), allow_nan=False) for record in records)
    rest = memoryview("".join(f"{line}\n" for line in lines).encode())
    try:
        while rest:
            rest = rest[file.write(rest) :]
    except OSError as error:
        problem = refusal(Path(os.fsdecode(file.name)), str(error.strerror))
        raise SlimeLikeError(problem, code="disk-refused") from error


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            yield number, line
            if not line.endswith(b"\n"):  # its writer may append the rest, which must not be read as another line
                return


def _parse_object(line: bytes) -> dict[str, Any] | None:
    try:  # the same names are on every line, so they are shared
        record = json.loads(
            line,
            object_hook=lambda read: {sys.intern(name): read[name] for name in read},
            parse_constant=lambda _: None,
        )
        return record if isinstance(record, dict) else None
    except (ValueError, RecursionError):
        return None


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
