"""Files with one JSON object per line, each with its step. They may grow while they are read."""

import json
import math
import mmap
import os
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from io import FileIO
from pathlib import Path
from typing import Any

from slime_like.errors import DataError, SlimeLikeError
from slime_like.system.disk import refusal


def read_lines(path: Path, newest: int | None = None) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the ``newest`` objects (by default all), each with its line number, from 1. Skips an unfinished last line.

    Raises:
        DataError: one of these lines is finished, but is not a JSON object with a step.
    """
    lines = _lines(path) if newest is None else deque(_lines(path), maxlen=newest)
    for number, line in lines:
        record = _read_object(line, f"{path}:{number}")
        if record is not None:
            yield number, record


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

    Raises:
        SlimeLikeError: the disk rejects the write.
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


def _read_object(line: bytes, where: str) -> dict[str, Any] | None:
    """Return the object, or ``None`` if the line is still being written."""
    record = _parse_object(line)
    if record is not None and isinstance(record.get("step"), int):
        return record
    if line.endswith(b"\n"):
        raise DataError(
            "the line is not a JSON object with a step",
            code="damaged-line",
            who=where,
            remedy="restore or remove the file",
        )
    return None


def _parse_object(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line, object_hook=_with_shared_names, parse_constant=lambda _: None)
        return record if isinstance(record, dict) else None
    except (ValueError, RecursionError):
        return None


def _with_shared_names(record: dict[str, Any]) -> dict[str, Any]:
    # The same names are on every line.
    return {sys.intern(name): value for name, value in record.items()}


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
