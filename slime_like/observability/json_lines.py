"""Files of JSON objects, one a line, each with its step; they may grow while they are read."""

import json
import math
import mmap
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from io import FileIO
from pathlib import Path
from typing import Any

from slime_like.errors import DataError, SlimeLikeError

NEWEST_BYTES = 2**25
"""How much of a table's end is read."""
_BLOCK_BYTES = 2**22


def read_lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Every object with the number of its line, from 1. An unfinished last line is skipped.

    Raises:
        DataError: a finished line is not a JSON object with a step.
    """
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            record = _read_object(line, f"{path}:{number}")
            if record is not None:
                yield number, record
            if not line.endswith(b"\n"):  # a writer may have finished it by now, but its beginning has been read
                return


def newest_lines(path: Path, count: int) -> tuple[list[dict[str, Any]], int]:
    """The last ``count`` objects, of at most ``NEWEST_BYTES``, and how many lines stand before them.

    Raises:
        DataError: one of these lines is finished, but is not a JSON object with a step.
    """
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        start = max(0, size - NEWEST_BYTES)
        before = sum(
            _read(file, at, min(_BLOCK_BYTES, start - at)).count(b"\n") for at in range(0, start, _BLOCK_BYTES)
        )
        *finished, rest = _read(file, start, size - start).split(b"\n")
    if start:  # the first line began before
        finished, before = finished[1:], before + 1
    skipped = max(0, len(finished) + bool(rest) - count)
    lines = [*(line + b"\n" for line in finished[skipped:]), rest]
    found = [_read_object(line, f"{path}:{number}") for number, line in enumerate(lines, before + skipped + 1)]
    return [record for record in found if record is not None], before + skipped


def open_for_append(path: Path) -> FileIO:
    """Open at the end of the last whole line; a half-written one, left by a killed run, would damage what follows."""
    size = path.stat().st_size if path.is_file() else 0
    whole, last = _last_line(path) if size else (0, b"")
    ended = not last or _parse_object(last) is not None
    if not ended:
        os.truncate(path, whole)
    file = path.open("ab", buffering=0)  # what a full disk refused must not be tried again when the file is closed
    if ended and whole < size:
        file.write(b"\n")
    return file


def write_lines(file: FileIO, records: Iterable[Mapping[str, Any]]) -> None:
    """Append one line per record; non-finite numbers stand as ``null``. Raises where the disk refuses."""
    lines = (json.dumps(_finite(dict(record)), allow_nan=False) for record in records)
    rest = memoryview("".join(f"{line}\n" for line in lines).encode())
    try:
        while rest:
            rest = rest[file.write(rest) :]
    except OSError as error:
        raise SlimeLikeError(
            f"{os.fspath(file.name)} could not be written ({error.strerror})",
            code="disk-refused",
            remedy="free space there, and restart to resume from the last checkpoint",
        ) from error


def _read(file: Any, start: int, length: int) -> bytes:
    file.seek(start)
    return bytes(file.read(length))


def _last_line(path: Path) -> tuple[int, bytes]:
    """Where what follows the last newline begins, and that; only the end of the file is read."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        whole = content.rfind(b"\n") + 1
        return whole, content[whole:]


def _read_object(line: bytes, where: str) -> dict[str, Any] | None:
    """Return the object, or ``None`` for a line that is still being written."""
    record = _parse_object(line)
    if record is not None and isinstance(record.get("step"), int):
        return record
    if line.endswith(b"\n"):
        raise DataError(
            "this line is not a JSON object with a step",
            code="damaged-line",
            who=where,
            remedy="restore or remove the file",
        )
    return None


def _parse_object(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line, object_hook=_interned, parse_constant=lambda _: None)
        return record if isinstance(record, dict) else None
    except (ValueError, RecursionError):
        return None


def _interned(record: dict[str, Any]) -> dict[str, Any]:
    """Names repeat on every line."""
    return {sys.intern(name): value for name, value in record.items()}


def _finite(value: Any) -> Any:
    """Return ``value`` with every number that is not finite as ``None``."""
    if isinstance(value, dict):
        return {name: _finite(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
