"""Child processes by id: who is new, and how they are ended."""

import os
from collections.abc import Collection, Iterable
from contextlib import suppress
from pathlib import Path

import psutil  # type: ignore[import-untyped]

from slime_like.system.resource_tracker import is_tracker


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
