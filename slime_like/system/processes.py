"""Descendants of this process, how they are ended, Python's resource tracker, and memory settings of this process."""

import atexit
import ctypes
import gc
import os
import platform
import signal
import subprocess
import sys
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import resource_tracker, util
from pathlib import Path
from typing import Any

import psutil

_TRACKER = "multiprocessing.resource_tracker"

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3  # malloc.h
_NEVER, _KEPT_BYTES = -1, 2**30
_STEP_BYTES = 2**26


def child_command(arguments: Sequence[str]) -> list[str]:
    """Return the command of ``slime-like ARGUMENTS`` in a child process that gets SIGTERM when this process ends."""
    call = "from slime_like.commands.main import run_child; sys.exit(run_child(int(sys.argv[1]), sys.argv[2:]))"
    return [sys.executable, "-c", f"import sys; {call}", str(os.getpid()), *arguments]


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

    def spawn(path: bytes, args: Sequence[Any], passfds: Sequence[int]) -> None:
        """Start the tracker like multiprocessing does, but detached. Without a process id, nothing waits for it."""
        command = ["/bin/sh", "-c", '"$@" &', "sh", path, *args[1:]]
        subprocess.run(command, pass_fds=passfds, start_new_session=True, check=True)

    usual, util.spawnv_passfds = util.spawnv_passfds, spawn  # type: ignore[assignment]
    try:
        resource_tracker.ensure_running()
    finally:
        util.spawnv_passfds = usual


def is_tracker(process: psutil.Process) -> bool:
    try:
        return any(_TRACKER in part for part in process.cmdline())
    except psutil.NoSuchProcess:
        return False


def keep_freed_memory() -> bool:
    """Let glibc keep freed memory, in blocks of up to 1 GiB.

    By default, glibc returns blocks of some MiB to the kernel as soon as they are freed, and the next operation of a
    training step allocates them again. The page faults take an eighth of a step on a CPU. The process stays at its peak
    size, which it would reach again in the next step. Returns ``False`` with another C library, which is left alone.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    sizes = {_M_MMAP_THRESHOLD: _KEPT_BYTES, _M_TRIM_THRESHOLD: _NEVER, _M_TOP_PAD: _STEP_BYTES}
    return all(mallopt(parameter, size) == 1 for parameter, size in sizes.items())


@contextmanager
def exempt_from_gc() -> Iterator[None]:
    """Exempt objects created inside from garbage collection, for imports of large packages.

    Searching a trainer's million objects for garbage takes a sixth of the import's time, and later more time in every
    collection. The exemption ends with the process, since packages warn of objects that were not freed.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
        gc.freeze()
        atexit.unregister(gc.unfreeze)
        atexit.register(gc.unfreeze)
    finally:
        if was_on:
            gc.enable()
