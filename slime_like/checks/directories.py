"""Checks that directories can be created and written to, made before anything starts."""

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from slime_like.config.rollout import SyncConfig


def run_directory_problems(run_dir: Path) -> Iterator[str]:
    """Check that the run directory is writable and holds one run. A later run may rename it."""
    place = os.path.realpath(run_dir)  # unlike Path.resolve, it accepts a link to itself
    shared = {os.path.realpath(os.environ.get("HOME", "/")): "your home directory", "/": "the root of the file system"}
    if place in shared:
        yield f"run_dir={run_dir} is {shared[place]}; give a directory in it, such as {Path(place, 'run')}"
    else:
        yield from writable_problems("run_dir", run_dir)


def sync_directory_problems(sync: SyncConfig) -> Iterator[str]:
    return writable_problems("sync.directory", sync.directory if sync.transport == "directory" else None)


def writable_problems(field: str, directory: Path | None) -> Iterator[str]:
    if directory is not None and (problem := directory_problem(directory)):
        yield f"{field}={directory} {problem}"


def directory_problem(path: Path) -> str | None:
    """Return why nothing can be written to ``path``, as the end of a sentence with its remedy, or ``None``.

    ``path`` need not exist. A temporary directory is created in it or in its nearest existing parent, because
    permissions don't show everything: a read-only file system or ``/proc`` rejects every user.
    """
    try:
        nearest = next(place for place in (path, *path.absolute().parents) if place.exists())
        if not nearest.is_dir():
            where = "is a file" if nearest == path else f"is below the file {nearest}"
            return f"{where}; give a directory"
        Path(tempfile.mkdtemp(prefix=".slime-like-", dir=nearest)).rmdir()
        with contextlib.suppress(FileNotFoundError):
            os.lstat(path)  # the name may be invalid, e.g. too long
    except OSError as error:
        return f"cannot be written to ({error.strerror or error}); give a directory on a writable disk"
    return None
