"""A small process that outlives a killed driver just long enough to end what it leaves behind.

A driver that ends in any other way stops its Ray cluster itself. One that is killed outright takes the cluster's main
daemons along (the kernel sees to that), but Ray's agents wait a minute for them to come back. The guard knows them by
process id and ends them at once.

Run as ``python -m slime_like.orchestration.guard RAYLET_PID`` with a pipe as standard input: a line on it means all is
well, its end without a line means the driver is gone.
"""

from __future__ import annotations

import select
import subprocess
import sys

import psutil  # type: ignore[import-untyped]

_LOOK_EVERY_S = 1.0
_GRACE_S = 2.0


def start(raylet_pid: int) -> subprocess.Popen[bytes]:
    """Start a guard over the descendants of ``raylet_pid``; keep the result, and ``dismiss`` it at the end."""
    command = [sys.executable, "-m", "slime_like.orchestration.guard", str(raylet_pid)]
    # A session of its own: Ctrl-C on the terminal is the driver's business.
    return subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)


def dismiss(guard: subprocess.Popen[bytes]) -> None:
    """Tell the guard that the driver ends in good order."""
    try:
        guard.communicate(b"done\n", timeout=10)
    except (BrokenPipeError, subprocess.TimeoutExpired):
        guard.kill()
        guard.wait()


def watch(raylet_pid: int) -> None:
    """Remember the raylet's descendants until standard input says something, or ends."""
    known: dict[int, psutil.Process] = {}
    while not select.select([sys.stdin], [], [], _LOOK_EVERY_S)[0]:
        try:
            known |= {child.pid: child for child in psutil.Process(raylet_pid).children(recursive=True)}
        except psutil.NoSuchProcess:
            continue  # the raylet is gone; standard input will end now
    if sys.stdin.readline():
        return
    _, alive = psutil.wait_procs(list(known.values()), timeout=_GRACE_S)
    for process in alive:
        try:
            process.kill()  # psutil checks the start time, so a reused process id is safe
        except psutil.NoSuchProcess:
            continue


if __name__ == "__main__":
    watch(int(sys.argv[1]))
