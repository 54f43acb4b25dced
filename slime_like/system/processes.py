"""Child processes by id: who is new, and how they are ended."""

import os
from collections.abc import Collection, Iterable
from pathlib import Path

import psutil  # type: ignore[import-untyped]

from slime_like.system.resource_tracker import is_tracker


def process_ids() -> frozenset[int]:
    """Ids of all descendants of this process."""
    return frozenset(child.pid for child in psutil.Process().children(recursive=True))


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
    processes = [process for pid in process_ids if (process := _process(pid)) is not None]
    _, alive = psutil.wait_procs(processes, timeout=grace_s)
    for process in alive:
        _signal(process, hard=False)
    _, alive = psutil.wait_procs(alive, timeout=2.0)
    for process in alive:
        _signal(process, hard=True)
    psutil.wait_procs(alive, timeout=5.0)


def _process(process_id: int) -> psutil.Process | None:
    """``None`` where it has ended, perhaps this moment: those of one engine end together."""
    try:
        return psutil.Process(process_id)
    except psutil.NoSuchProcess:
        return None


def _signal(process: psutil.Process, hard: bool) -> None:
    try:
        process.kill() if hard else process.terminate()
    except psutil.NoSuchProcess:
        return
