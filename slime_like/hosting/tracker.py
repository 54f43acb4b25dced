"""Python's resource tracker: the process that removes shared memory and semaphores once all who share them are gone."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from multiprocessing import resource_tracker, util
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]

_MODULE = "multiprocessing.resource_tracker"
_KIND = "shared_memory"


def start_tracker() -> None:
    """Start this process's tracker, in a session of its own, unless there is one.

    When a worker of Ray's has ended, all of its process group is killed at once; a tracker in that group would die
    with those it is to clean up after.
    """
    usual = util.spawnv_passfds
    util.spawnv_passfds = _spawn
    try:
        resource_tracker.ensure_running()
    finally:
        util.spawnv_passfds = usual


def track(file: Path) -> None:
    """Have a file in shared memory removed once this process and its children have ended, however they do."""
    resource_tracker.register(f"/{file.name}", _KIND)


def remove_tracked(file: Path) -> None:
    """Remove it now."""
    file.unlink(missing_ok=True)
    resource_tracker.unregister(f"/{file.name}", _KIND)


def is_tracker(process: psutil.Process) -> bool:
    """Leave those alone that are: they end by themselves, after all others have."""
    try:
        return any(_MODULE in part for part in process.cmdline())
    except psutil.NoSuchProcess:
        return False


def _spawn(path: bytes, args: Sequence[Any], passfds: Sequence[int]) -> int:
    """As multiprocessing does it, but for the session; it outlives us, so that nobody waits for it."""
    process = subprocess.Popen(args, executable=path, pass_fds=passfds, start_new_session=True)
    process.returncode = 0  # who is not waited for is not complained about
    return process.pid
