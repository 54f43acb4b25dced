"""Files of JSON objects, one a line, each with its step; they may grow while they are read."""

import json
import mmap
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from io import FileIO
from pathlib import Path
from typing import Any

from slime_like.errors import DataError, SlimeLikeError

MAX_STEP = 10**12
NEWEST_BYTES = 2**25
"""How much of a table's end is read."""
_MAX_LINE_BYTES = 2**26
_MAX_NUMBER = 1e300
"""Millions of numbers below it have a finite sum."""
_BLOCK_BYTES = 2**22


def read_lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Every object with the number of its line, from 1. An unfinished last line is skipped.

    Raises:
        DataError: a finished line is not a JSON object with a step.
    """
    number = 0
    with path.open("rb") as file:
        while line := file.readline(_MAX_LINE_BYTES):
            number += 1
            record = _read_object(line, f"{path}:{number}", len(line) == _MAX_LINE_BYTES)
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


def damaged_line(problem: str, who: str) -> DataError:
    """The error for a line that no run has written."""
    return DataError(problem, code="damaged-line", who=who, remedy="restore or remove the file")


def is_size(value: Any) -> bool:
    """Whether it is a whole number from 0 to ``MAX_STEP``."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_STEP


def _read(file: Any, start: int, length: int) -> bytes:
    file.seek(start)
    return bytes(file.read(length))


def _last_line(path: Path) -> tuple[int, bytes]:
    """Where what follows the last newline begins, and that; only the end of the file is read."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        whole = content.rfind(b"\n") + 1
        return whole, content[whole:]


def _read_object(line: bytes, where: str, too_long: bool = False) -> dict[str, Any] | None:
    """``None`` for a line that is still being written."""
    record = None if too_long else _parse_object(line)
    if record is not None and is_size(record.get("step")):
        return record
    if line.endswith(b"\n") or too_long:
        raise damaged_line("this line is not a JSON object with a step", where)
    return None


def _parse_object(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line.decode(errors="replace"))
        return _finite(record) if isinstance(record, dict) else None
    except (ValueError, RecursionError):  # also thousands of digits, or of brackets
        return None


def _finite(value: Any) -> Any:
    """``value`` with every number that is not finite, or too large for a sum, as ``None``."""
    if isinstance(value, dict):
        return {
            sys.intern(name): item  # names repeat on every line
            if (item.__class__ is float and -_MAX_NUMBER <= item <= _MAX_NUMBER) or item.__class__ is str
            else _finite(item)
            for name, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, int | float) and not abs(value) <= _MAX_NUMBER else value
