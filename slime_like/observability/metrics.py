"""Metrics on disk: one JSON line a record, TensorBoard and Weights & Biases beside it where they are on."""

from __future__ import annotations

import json
import math
import os
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from slime_like.errors import ConfigError, DataError, SlimeLikeError

if TYPE_CHECKING:
    from slime_like.config import LoggingConfig

METRICS_FILE = "metrics.jsonl"
_TABLE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")


class Tracker(Protocol):
    """Somewhere else that figures go."""

    def log(self, step: int, values: Mapping[str, float]) -> None: ...

    def log_table(self, step: int, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None: ...

    def close(self) -> None: ...


class MetricLogger:
    """Writes a run's figures to ``run_dir/metrics.jsonl``, and to the trackers the configuration turns on.

    The file is only ever appended to, one flushed line a call; a resumed run goes on in the same file. Non-finite
    values stand as ``null`` there.

    Args:
        config: which trackers are on.
        run_dir: the run's directory; made if missing.

    Raises:
        ConfigError: a tracker is on whose package is not installed.
        SlimeLikeError: from every method that writes, where the disk refuses.
    """

    def __init__(self, config: LoggingConfig, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._trackers = _open_trackers(config, run_dir)
        run_dir.mkdir(parents=True, exist_ok=True)
        self._file = _open_for_append(run_dir / METRICS_FILE)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Record ``values`` at ``step``; several calls may share a step.

        Raises:
            ValueError: a value is named "step" or "time", the line's own fields.
        """
        _refuse_reserved(values, ("step", "time"))
        numbers = {name: float(value) for name, value in values.items()}
        _write_lines(self._file, [{"step": step, "time": time.time(), **numbers}])
        for tracker in self._trackers:
            tracker.log(step, numbers)

    def log_table(self, step: int, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """Append ``rows`` to ``run_dir/tables/NAME.jsonl``, one object a row with ``step`` and the columns as keys.

        Raises:
            ValueError: ``name`` is no plain file name, columns repeat or are named "step", or a row's length differs.
        """
        if not _TABLE_NAME.fullmatch(name):
            raise ValueError(f"table name {name!r}: use letters, digits, '_', '-' and '.' only")
        _refuse_reserved(columns, ("step",))
        if len(set(columns)) != len(columns):
            raise ValueError(f"table {name}: a column is named twice in {list(columns)}")
        for index, row in enumerate(rows):
            if len(row) != len(columns):
                raise ValueError(f"table {name}, row {index}: {len(row)} cells for {len(columns)} columns")
        path = self._run_dir / "tables" / f"{name}.jsonl"
        path.parent.mkdir(exist_ok=True)
        with _open_for_append(path) as file:
            _write_lines(file, ({"step": step, **dict(zip(columns, row, strict=True))} for row in rows))
        for tracker in self._trackers:
            tracker.log_table(step, name, columns, rows)

    def close(self) -> None:
        """Write out everything; may be called twice."""
        self._file.close()
        trackers, self._trackers = self._trackers, []
        for tracker in trackers:
            tracker.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """All records of a metrics file, in order. A truncated last line, as a killed run leaves it, is left out.

    Raises:
        DataError: the file is missing, or a line before the last is no JSON object.
    """
    if not path.is_file():
        raise DataError(f"{path}: there is no such metrics file; give the path of a run's {METRICS_FILE}")
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    records = []
    for number, line in enumerate(lines[:-1], start=1):  # what follows the last newline was not finished
        record = _parse(line)
        if record is None:
            raise DataError(f"{path}:{number}: this line is no JSON object; the file was damaged, restore or remove it")
        records.append(record)
    last = _parse(lines[-1])
    return records if last is None else [*records, last]


def series(records: Iterable[Mapping[str, Any]], name: str) -> tuple[list[int], list[float]]:
    """Steps, rising, and finite values of one metric; of a run that went on from an earlier step, what counts now."""
    by_step = {record["step"]: record[name] for record in current_records(records) if record.get(name) is not None}
    steps = sorted(by_step)
    return steps, [by_step[step] for step in steps]


def current_records(records: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Drop records that a resumed run has superseded: where steps go back, later ones were run again."""
    kept: list[Mapping[str, Any]] = []
    for record in records:
        while kept and kept[-1]["step"] > record["step"]:
            kept.pop()
        kept.append(record)
    return kept


# --------------------------------------------------------------------------------------------------------- JSON lines
def _open_for_append(path: Path) -> FileIO:
    """Open at the end of the last whole line; a half-written one, left by a killed run, would damage what follows."""
    if path.is_file():
        content = path.read_bytes()
        whole = content.rfind(b"\n") + 1
        if whole < len(content):
            _mend_tail(path, content, whole)
    return path.open("ab", buffering=0)  # what a full disk refused must not be tried again when the file is closed


def _mend_tail(path: Path, content: bytes, whole: int) -> None:
    tail_is_record = _parse(content[whole:].decode("utf-8", errors="replace")) is not None
    with path.open("rb+") as file:
        if tail_is_record:
            file.seek(0, 2)
            file.write(b"\n")
        else:
            file.truncate(whole)


def _write_lines(file: FileIO, records: Iterable[Mapping[str, Any]]) -> None:
    lines = (json.dumps({key: _finite(value) for key, value in record.items()}, allow_nan=False) for record in records)
    rest = memoryview("".join(f"{line}\n" for line in lines).encode())
    try:
        while rest:
            rest = rest[file.write(rest) :]
    except OSError as error:
        raise SlimeLikeError(
            f"{os.fspath(file.name)} could not be written ({error.strerror}); free space there, and restart to "
            "resume from the last checkpoint"
        ) from error


def _finite(value: Any) -> Any:
    """``value`` with every non-finite number, also inside lists, as ``None``: JSON has no name for them."""
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _parse(line: str) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except json.JSONDecodeError:
        return None
    return record if isinstance(record, dict) else None


def _refuse_reserved(names: Iterable[str], reserved: tuple[str, ...]) -> None:
    taken = sorted(set(reserved).intersection(names))
    if taken:
        raise ValueError(f"{', '.join(taken)}: this field name is reserved; rename the value")


# ----------------------------------------------------------------------------------------------------------- trackers
def _open_trackers(config: LoggingConfig, run_dir: Path) -> list[Tracker]:
    trackers: list[Tracker] = []
    if config.wandb:  # first: it is the one whose start may fail
        trackers.append(WandbTracker(config.wandb_project, run_dir))
    if config.tensorboard:
        trackers.append(TensorBoardTracker(run_dir / "tensorboard"))
    return trackers


class TensorBoardTracker:
    """Scalars as TensorBoard event files in ``directory``. Tables have no place there and stay in their JSON lines."""

    def __init__(self, directory: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ConfigError(
                [f"logging.tensorboard=true: {error}; run `pip install tensorboard`, or set logging.tensorboard=false"]
            ) from error
        self._writer: Any = SummaryWriter(log_dir=str(directory))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def log_table(self, step: int, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        pass

    def close(self) -> None:
        self._writer.close()


class WandbTracker:
    """One Weights & Biases run, named like the run directory."""

    def __init__(self, project: str, run_dir: Path) -> None:
        try:
            import wandb
        except ImportError as error:
            raise ConfigError(
                [f"logging.wandb=true: {error}; run `pip install wandb`, or set logging.wandb=false"]
            ) from error
        run_dir.mkdir(parents=True, exist_ok=True)
        self._wandb: Any = wandb
        self._run: Any = wandb.init(project=project, name=run_dir.name, dir=str(run_dir))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def log_table(self, step: int, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        table = self._wandb.Table(columns=list(columns), data=[list(row) for row in rows])
        self._run.log({name: table}, step=step)

    def close(self) -> None:
        self._run.finish()
