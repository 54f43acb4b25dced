"""Durable and atomic writes, bounded logs, and descriptions of failed writes and damaged files."""

import functools
import hashlib
import itertools
import os
import secrets
import shutil
import threading
import time
import weakref
from collections.abc import Container, Iterator
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path
from typing import TextIO

_LOG_BYTES, _HEAD_BYTES, _TAIL_BYTES = 2**26, 2**25, 2**20
_CHECK_LOGS_S = 1.0


def refusal(path: Path, reason: str, contents: str = "") -> str:
    """Describe a failed write: the path and its contents, the reason, the free space and the remedy."""
    try:
        usage = shutil.disk_usage(next(place for place in (path, *path.absolute().parents) if place.exists()))
        room = f"{usage.free} of {usage.total} bytes are free"
    except OSError as error:  # the disk is gone
        room = f"free space is unknown: {error.strerror or error}"
    return f"{path}{contents}: could not be written ({reason}; {room}); free space there"


def length_fault(found: int, written: int) -> str | None:
    """Describe a file whose size is not the number of bytes written, or return ``None``. Follows the file's name."""
    if found == written:
        return None
    if found > written:
        return f"has {found} bytes, though {written} were written"
    return f"is {'cut off' if found else 'empty'}: it has {found} of the {written} bytes that were written"


def replace_directory(partial: Path, directory: Path) -> None:
    """Rename ``partial`` to ``directory``. An existing directory is moved aside first and then removed."""
    old = directory.parent / f".{directory.name}.old"
    shutil.rmtree(old, ignore_errors=True)
    if directory.exists():
        directory.rename(old)
    partial.rename(directory)
    sync(directory.parent)
    shutil.rmtree(old, ignore_errors=True)


def sync(path: Path) -> None:
    """Make a file's content or a directory's entries durable."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def open_log(directory: Path, role: str) -> FileIO:
    """Create the first of ROLE.log, ROLE.2.log and so on that does not exist, for appending and reading."""
    names = itertools.chain([f"{role}.log"], (f"{role}.{number}.log" for number in itertools.count(2)))
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_EXCL
    while True:
        with suppress(FileExistsError):
            file = FileIO(str(directory / next(names)), "a+", opener=lambda path, _: os.open(path, flags, 0o644))
            bound_log(file)
            return file


def bound_log(file: FileIO) -> None:
    """Bound a log to 64 MiB while ``file`` is open, whoever writes to it: drop the middle of what is beyond.

    A thread checks every second. It neither slows a writer, nor is needed for the last words of one that dies.
    """
    _start_log_bounds()
    _logs[os.dup(file.fileno())] = weakref.ref(file)  # a separate number: the file's own may soon be another file's


_logs: dict[int, weakref.ref[FileIO]] = {}


@functools.cache
def _start_log_bounds() -> None:
    threading.Thread(target=_keep_logs_bounded, name="log-bounds", daemon=True).start()


def _keep_logs_bounded() -> None:
    dropped: dict[int, int] = {}
    while True:
        time.sleep(_CHECK_LOGS_S)
        for number, reference in list(_logs.items()):
            with suppress(OSError):  # a full disk; the next check tries again
                dropped[number] = drop_middle(number, dropped.get(number, 0))
            if (file := reference()) is None or file.closed:
                del _logs[number]
                dropped.pop(number, None)
                os.close(number)


def drop_middle(log: int, dropped: int) -> int:
    """Shorten a log that is too long. Return how many bytes are missing, of which ``dropped`` were before."""
    if (end := os.fstat(log).st_size) <= _LOG_BYTES:
        return dropped
    start = end = end - _TAIL_BYTES
    tail = b""
    while more := os.pread(log, _TAIL_BYTES, end):  # also what is written meanwhile
        end, tail = end + len(more), tail + more
    dropped += start - _HEAD_BYTES
    line = f"\n[slime-like] {dropped} bytes are missing here: a log is bounded to {_LOG_BYTES >> 20} MiB\n"
    os.ftruncate(log, _HEAD_BYTES)
    os.pwrite(log, line.encode() + tail, _HEAD_BYTES)
    return dropped


def end_of_file(path: Path, nbytes: int) -> str:
    """Return the text in the file's last ``nbytes``, with replacement characters for what is not UTF-8."""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - nbytes))
        return file.read(nbytes).decode(errors="replace")


def bytes_below(directory: Path, but: Container[str] = ()) -> int:
    """Return the size of all files in a directory, without its entries ``but``."""
    files = (path for path in directory.rglob("*") if path.relative_to(directory).parts[0] not in but)
    return sum(path.stat().st_size for path in files if path.is_file())


def file_digest(path: Path) -> str:
    """Return a file's SHA-256, in hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def link_tree(source: Path, target: Path) -> None:
    """Link the files of ``source`` into ``target``, or copy them if the file system has no hard links."""

    def link_or_copy(source: str, target: str) -> None:
        try:
            os.link(source, target)
        except OSError:  # another file system, or one without links
            shutil.copyfile(source, target)

    shutil.copytree(source, target, copy_function=link_or_copy)


def sync_tree(directory: Path) -> None:
    """Make all files below a directory, and their names, durable."""
    for place, _, files in os.walk(directory, topdown=False):
        for name in files:
            sync(Path(place, name))
        sync(Path(place))


def write_private(path: Path, text: str) -> None:
    """Write a file that only its owner may read, completely or not at all. A missing directory is created."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    draft = path.with_name(f"{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as stream:
        stream.write(text)
    draft.replace(path)


@contextmanager
def whole_file(path: Path) -> Iterator[TextIO]:
    """Open a file that appears under its name once it is complete. Links are followed. A failure leaves nothing."""
    path = path.resolve()
    partial = path.with_name(f".{path.name}.partial")
    try:
        with partial.open("w", encoding="utf-8") as file:
            yield file
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
