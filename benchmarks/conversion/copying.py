"""Measure the disk's speed by copying the same bytes."""

import os
import time
from collections.abc import Iterable
from pathlib import Path

_BLOCK = 8 << 20


def forget(files: Iterable[Path]) -> None:
    """Flush the files to disk and drop them from the page cache."""
    for file in files:
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def remember(files: Iterable[Path]) -> None:
    """Read the files into the page cache."""
    for file in files:
        with file.open("rb", buffering=0) as stream:
            while stream.read(_BLOCK):
                pass


def copy_seconds(files: Iterable[Path], target: Path) -> float:
    """Copy all files into one, in blocks of 8 MiB on one thread, and sync it; return the seconds."""
    started = time.monotonic()
    with target.open("wb", buffering=0) as out:
        for file in files:
            with file.open("rb", buffering=0) as stream:
                while block := stream.read(_BLOCK):
                    out.write(block)
        os.fsync(out.fileno())
    return time.monotonic() - started
