"""Descendants of this process, how they are ended, and Python's resource tracker."""

import os
import signal
import subprocess
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from multiprocessing import resource_tracker, util
from pathlib import Path
from typing import Any

import psutil

_TRACKER = "multiprocessing.resource_tracker"


def process_ids() -> frozenset[int]:
    """Return the ids of all descendants of this process, without resource trackers."""
    return frozenset(descendants(os.getpid()))


def descendants(process_id: int) -> list[int]:
    """Return the descendants of a process, without Python's resource trackers, which end after all others."""
    try:
        children = psutil.Process(process_id).children(recursive=True)
    except psutil.NoSuchProcess:
        return []
    return [child.pid for child in children if not is_tracker(child)]


def resident_bytes() -> int:
    """Return the resident size of this process and its descendants. Shared pages count once per process."""
    total = 0
    for pid in (os.getpid(), *descendants(os.getpid())):
        with suppress(psutil.Error):  # it has ended
            total += psutil.Process(pid).memory_info().rss
    return total


def end_descendants(keep: Collection[int] = ()) -> None:
    """Kill all descendants of this process, which adopts orphans, except ``keep`` and their descendants."""
    while left := set(descendants(os.getpid())).difference(keep, *map(descendants, keep)):
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for pid in left:
            with suppress(ChildProcessError):  # a grandchild; this process adopts it when its parent has ended
                os.waitpid(pid, 0)


def is_alive(process_id: int) -> bool:
    """Return whether the process exists and is not a zombie."""
    try:
        return bool(psutil.Process(process_id).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def mapped_files(process_ids: Iterable[int], prefix: str) -> tuple[Path, ...]:
    """Return the files with this path prefix that the processes have mapped into memory."""
    found: set[Path] = set()
    for pid in process_ids:
        try:
            lines = (Path("/proc") / str(pid) / "maps").read_text().splitlines()
        except OSError:  # the process has ended
            continue
        found |= {Path(line[line.index(prefix) :]) for line in lines if prefix in line}
    return tuple(sorted(found))


def end_processes(process_ids: Iterable[int], grace_s: float) -> None:
    """Wait ``grace_s`` seconds for processes that are ending, then terminate the rest, then kill."""
    alive: list[psutil.Process] = []
    for pid in process_ids:
        with suppress(psutil.NoSuchProcess):
            alive.append(psutil.Process(pid))
    for timeout_s, end in ((grace_s, psutil.Process.terminate), (2.0, psutil.Process.kill)):
        _, alive = psutil.wait_procs(alive, timeout=timeout_s)
        for process in alive:
            with suppress(psutil.NoSuchProcess):
                end(process)
    psutil.wait_procs(alive, timeout=5.0)


def start_tracker() -> None:
    """Start this process's resource tracker in a separate session, unless there is one.

    The tracker removes shared memory and semaphores after the processes that share them have ended. A Ray worker kills
    its children and its process group when it ends, which would kill a normal tracker before it can clean up.
    """
    usual = util.spawnv_passfds
    util.spawnv_passfds = _spawn  # type: ignore[assignment]
    try:
        resource_tracker.ensure_running()
    finally:
        util.spawnv_passfds = usual


def is_tracker(process: psutil.Process) -> bool:
    try:
        return any(_TRACKER in part for part in process.cmdline())
    except psutil.NoSuchProcess:
        return False


def _spawn(path: bytes, args: Sequence[Any], passfds: Sequence[int]) -> None:
    """Start the tracker like multiprocessing does, but detached. Without a process id, nothing waits for it."""
    subprocess.run(
        ["/bin/sh", "-c", '"$@" &', "sh", path, *args[1:]], pass_fds=passfds, start_new_session=True, check=True
    )
