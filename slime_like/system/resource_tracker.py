"""Python's resource tracker: the process that removes shared memory and semaphores once all who share them are gone."""

import subprocess
from collections.abc import Sequence
from multiprocessing import resource_tracker, util
from typing import Any

import psutil  # type: ignore[import-untyped]

_MODULE = "multiprocessing.resource_tracker"


def start_tracker() -> None:
    """Start this process's tracker, out of reach, unless there is one.

    A worker of Ray's that ends kills its children, and when it has ended, all of its process group is killed; a tracker
    among them would die with those it is to clean up after.
    """
    usual = util.spawnv_passfds
    util.spawnv_passfds = _spawn  # type: ignore[assignment]
    try:
        resource_tracker.ensure_running()
    finally:
        util.spawnv_passfds = usual


def is_tracker(process: psutil.Process) -> bool:
    """Return whether the process is a tracker: those end by themselves, after all others have."""
    try:
        return any(_MODULE in part for part in process.cmdline())
    except psutil.NoSuchProcess:
        return False


def _spawn(path: bytes, args: Sequence[Any], passfds: Sequence[int]) -> None:
    """Start it in a separate session and detached, otherwise as multiprocessing does. Without a process id,
    multiprocessing does not wait for it."""
    subprocess.run(
        ["/bin/sh", "-c", '"$@" &', "sh", path, *args[1:]], pass_fds=passfds, start_new_session=True, check=True
    )
