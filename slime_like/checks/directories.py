"""Can a directory be made, and written into? Tried out before anything starts."""

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from slime_like.config.run import RunConfig
from slime_like.system.words import from_here


def run_directory_problems(config: RunConfig) -> Iterator[str]:
    """Can it be made, and written into, and moved aside by a later run?"""
    if problem := shared_directory_problem(config.run_dir) or directory_problem(config.run_dir):
        yield f"run_dir={config.run_dir} {problem}"


def dump_directory_problems(config: RunConfig) -> Iterator[str]:
    directory = config.debug.save_rollouts
    if directory is not None and (problem := directory_problem(directory)):
        yield f"debug.save_rollouts={directory} {problem}"


def sync_directory_problems(config: RunConfig) -> Iterator[str]:
    directory = config.sync.directory if config.sync.transport == "directory" else None
    if directory is not None and (problem := directory_problem(directory)):
        yield f"sync.directory={directory} {problem}"


def missing(path: Path) -> str:
    """ "does not exist"; of what lies below the current directory, that a relative path begins there."""
    return f"does not exist{from_here(path)}"


def directory_problem(path: Path) -> str | None:
    """Why nothing could be written into ``path``, as the end of a sentence with its remedy; ``None`` where it could.

    ``path`` need not exist: then its nearest parent that does is tried, by making a directory there that is removed at
    once. Permissions alone do not show it: a read-only file system or ``/proc`` refuses every user.
    """
    try:
        nearest = _nearest(path)
        if nearest is None:
            return "is a file; give a directory"
        if not nearest.is_dir():
            return f"is below {nearest}, which is a file; give a path below a directory"
        Path(tempfile.mkdtemp(prefix=".slime-like-", dir=nearest)).rmdir()
        # A name can be wrong by itself, e.g. too long.
        with contextlib.suppress(FileNotFoundError):
            os.lstat(path)
    except OSError as error:
        return f"cannot be written to ({error.strerror or error}); give a directory on a disk that can be"
    return None


def shared_directory_problem(path: Path) -> str | None:
    """Why ``path`` cannot belong to one run alone, as the end of a sentence with its remedy; ``None`` where it can."""
    place = Path(os.path.realpath(path))  # which, unlike Path.resolve, takes a link that leads to itself
    kinds = {_home(): "your home directory", Path("/"): "the root of the file system"}
    if place not in kinds:
        return None
    return (
        f"is {kinds[place]}, which holds more than one run; give a directory in it, such as {place / 'runs' / 'first'}"
    )


def _home() -> Path | None:
    try:
        return Path(os.path.realpath(Path.home()))
    except RuntimeError:  # a user whom the system does not know, as in some containers
        return None


def _nearest(path: Path) -> Path | None:
    """``path`` or the first parent of it that exists; ``None`` where ``path`` itself is no directory."""
    if path.exists():
        return path if path.is_dir() else None
    return next(parent for parent in path.absolute().parents if parent.exists())
