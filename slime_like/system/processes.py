"""Child processes by id: who is new, and how they are ended; Python's resource tracker among them."""

import os
import subprocess
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from multiprocessing import resource_tracker, util
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]

_TRACKER = "multiprocessing.resource_tracker"


def process_ids() -> frozenset[int]:
    """Ids of all descendants of this process, without resource trackers."""
    return frozenset(descendants(os.getpid()))


def new_children(before: Collection[int]) -> list[int]:
    """Descendants that are not in ``before``, without resource trackers."""
    return [pid for pid in descendants(os.getpid()) if pid not in before]


def descendants(process_id: int) -> list[int]:
    """Descendants of a process, without Python's resource trackers.

    Those remove what the others leave, and end when they do.
    """
    try:
        children = psutil.Process(process_id).children(recursive=True)
    except psutil.NoSuchProcess:
        return []
    return [child.pid for child in children if not is_tracker(child)]


def is_alive(process_id: int) -> bool:
    """Return whether the process runs; a zombie does not."""
    try:
        return bool(psutil.Process(process_id).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def mapped_files(process_ids: Iterable[int], prefix: str) -> tuple[Path, ...]:
    """Files whose path begins with ``prefix`` and which one of these processes has mapped into its memory."""
    found: set[Path] = set()
    for pid in process_ids:
        try:
            lines = (Path("/proc") / str(pid) / "maps").read_text().splitlines()
        except OSError:  # it has just ended
            continue
        found |= {Path(line[line.index(prefix) :]) for line in lines if prefix in line}
    return tuple(sorted(found))


def end_processes(process_ids: Iterable[int], grace_s: float) -> None:
    """Wait ``grace_s`` for processes that are ending, ask the rest to, then kill."""
    alive: list[psutil.Process] = []
    for pid in process_ids:
        with suppress(psutil.NoSuchProcess):  # it has ended, perhaps this moment: those of one engine end together
            alive.append(psutil.Process(pid))
    for timeout_s, end in ((grace_s, psutil.Process.terminate), (2.0, psutil.Process.kill)):
        _, alive = psutil.wait_procs(alive, timeout=timeout_s)
        for process in alive:
            with suppress(psutil.NoSuchProcess):
                end(process)
    psutil.wait_procs(alive, timeout=5.0)


def start_tracker() -> None:
    """Start this process's resource tracker, out of reach, unless there is one.

    It removes shared memory and semaphores once all who share them are gone. A worker of Ray's that ends kills its
    children, and when it has ended, all of its process group is killed; a tracker among them would die with those it is
    to clean up after.
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
        return any(_TRACKER in part for part in process.cmdline())
    except psutil.NoSuchProcess:
        return False


def _spawn(path: bytes, args: Sequence[Any], passfds: Sequence[int]) -> None:
    """Start it in a separate session and detached, otherwise as multiprocessing does. Without a process id,
    multiprocessing does not wait for it."""
    subprocess.run(
        ["/bin/sh", "-c", '"$@" &', "sh", path, *args[1:]], pass_fds=passfds, start_new_session=True, check=True
    )
