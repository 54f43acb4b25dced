"""A small process that outlives a killed driver just long enough to clean up after it.

A driver that ends in any other way cleans up itself. If it is killed, the kernel kills the main daemons of its Ray
cluster, but Ray's agents wait a minute for them to return, and shared memory and Ray's files stay forever.

Run as ``python -m ... DRIVER_PID PRIVATE_DIRECTORY LOGS RUN_NAME BUCKET_DIRECTORY...`` with a pipe as standard input.
``done`` means that all is well, ``failed`` that the driver is ending and reports its error. End of file without either
means that the driver was killed, which only this process can report.
"""

import fcntl
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from slime_like.orchestration.cluster.ray_session import RAY_DIRECTORY, put_away, remove_private, sessions
from slime_like.system.disk import end_of_file
from slime_like.system.processes import is_tracker
from slime_like.weights.transports.names import SHARED_MEMORY, cleanup

_GRACE_S = 2.0
_QUIET_S = 3.0
_GIVE_UP_S = 60.0
_STALE_S = 600.0
_LOOK_EVERY_S = 0.2
_KILLED_MESSAGE = (
    "slime-like: the driver (process {driver}) was killed: {cause}; the other processes of the run were ended; restart "
    "a training run to resume from the last checkpoint"
)
_BY_KERNEL = "by the kernel because memory ran out (see dmesg), by a batch system, or by a user"
_AGENT = re.compile(r"agent_name = (\w+)")
_LOST = {"raylet": re.compile("connection to the plasma store"), "gcs_server": re.compile("connect to GCS (at|within)")}
"""Last messages in the driver's log when Ray ends the driver, by lost daemon."""

_END_BYTES = 4096


def start(
    driver: int, private: Path, logs: Path, run_name: str, bucket_directories: Sequence[Path] = (SHARED_MEMORY,)
) -> subprocess.Popen[bytes]:
    """Start a guard before anything else. Keep the result, and ``dismiss`` it at the end."""
    arguments = map(str, (driver, private, logs.absolute(), run_name, *bucket_directories))
    command = [sys.executable, "-m", __name__, *arguments]
    # Separate session: the driver handles Ctrl-C on the terminal.
    return subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)


def dismiss(guard: subprocess.Popen[bytes], in_order: bool) -> bool:
    """Tell the guard how the driver ends. After a failure, a living guard removes what is left.

    Returns:
        True if the guard received the message.
    """
    assert guard.stdin is not None
    guard.send_signal(signal.SIGCONT)  # it may have been stopped
    try:
        guard.stdin.write(b"done\n" if in_order else b"failed\n")
        guard.stdin.close()
        if in_order:
            guard.wait(10)
    except (BrokenPipeError, subprocess.TimeoutExpired):
        guard.kill()
        guard.wait()
        return False
    return True


def watch(driver: int, private: Path, logs: Path, run_name: str, bucket_directories: Sequence[Path]) -> None:
    """Wait for a message or end of file on standard input."""
    word = sys.stdin.readline()
    if word == "done\n":
        return
    time.sleep(_GRACE_S)  # processes that notice the end by themselves may end by themselves
    cause = next((found for session in sessions(private) if (found := lost_daemon(session / "logs"))), None)
    clean_up(driver, private, logs, run_name, bucket_directories)
    if not word:  # last, since the terminal may be gone, too
        cause = f"by Ray, because {cause} (logs in {logs}/ray)" if cause else _BY_KERNEL
        print(_KILLED_MESSAGE.format(driver=driver, cause=cause), file=sys.stderr)


def lost_daemon(logs: Path) -> str | None:
    """Return the daemon whose loss made Ray end the driver, according to Ray's logs, or ``None``."""
    driver = "".join(end_of_file(log, _END_BYTES) for log in logs.glob("python-core-driver-*.log"))
    for kind, lost in _LOST.items():
        if lost.search(driver):
            return f"its {kind} had ended{ended_agent(logs) if kind == 'raylet' else ''}"
    return None


def ended_agent(logs: Path) -> str:
    """Return ", since its AGENT had ended" if the raylet ended with an agent, or an empty text."""
    log = logs / "raylet.err"
    names = _AGENT.findall(log.read_text(errors="replace")) if log.exists() else []
    return f", since its {names[-1]} had ended" if names else ""


def clean_up(driver: int, private: Path, logs: Path, run_name: str, bucket_directories: Sequence[Path]) -> None:
    """End the run's remaining processes, and remove its shared memory and Ray's files.

    Every process of a Ray session writes its log into the session's directory, whatever its parent and name.
    """
    end_writers(lambda: sessions(private), driver, _QUIET_S)
    cleanup(run_name, bucket_directories)
    for session in sessions(private):
        put_away(session, logs)
    remove_private(private)


def end_writers(directories: Callable[[], Sequence[Path]], but: int, quiet_s: float) -> None:
    """Kill all processes except ``but`` that write below ``directories``, until none has appeared for ``quiet_s``.

    A process is killed when two consecutive checks find it. Between fork and exec, a new child of ``but`` still holds
    the files of ``but``.
    """
    quiet_since = time.monotonic()
    deadline = quiet_since + _GIVE_UP_S
    seen: list[psutil.Process] = []
    while time.monotonic() - quiet_since < quiet_s and time.monotonic() < deadline:
        found = writers_below(directories(), but)
        for process in found:
            quiet_since = time.monotonic()
            with suppress(psutil.NoSuchProcess):
                if process in seen:
                    process.kill()  # psutil checks the start time, so a reused process id is safe
        seen = found
        time.sleep(_LOOK_EVERY_S)


def remove_stale(parent: Path, logs: Path) -> None:
    """Remove sessions below ``parent`` and weight buckets of this user's dead runs, whose reaper was killed, too.

    Logs to which ``logs`` links are put in its place.

    A session is stale if no process writes its files, and none was written for ten minutes; a bucket, if its maker is
    dead and no process has locked it (``SharedSegment``), even one with other process ids, in a container.
    """
    old = [private for private in parent.glob("slime-*") if sessions(private) and _is_old(private)]
    used = set[str]()
    for process in writers_below(old, 0) if old else ():
        with suppress(psutil.NoSuchProcess):
            used.update(file.path for file in process.open_files())
    for private in old:
        if not any(path.startswith(f"{private.resolve()}/") for path in used):
            for session in sessions(private):
                put_away(session, logs)
            remove_private(private)
    for bucket in SHARED_MEMORY.glob("slime-*.*.*"):
        with suppress(OSError, ValueError):  # it is gone, in use, or not ours
            about, maker = bucket.stat(), int(bucket.name.split(".")[1])
            if about.st_uid != os.geteuid() or _lives_since(maker, about.st_ctime):
                continue
            with bucket.open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                bucket.unlink()


def _is_old(private: Path) -> bool:
    """Return whether a directory of Ray's files is this user's, and its logs are old."""
    files = [private, *private.glob(f"{RAY_DIRECTORY}/session_*/logs"), *private.glob(f"{RAY_DIRECTORY}/*/logs/*")]
    with suppress(FileNotFoundError):  # its owner is removing it
        newest = max(file.stat().st_mtime for file in files)
        return private.stat().st_uid == os.geteuid() and time.time() - newest > _STALE_S
    return False


def _lives_since(process_id: int, moment: float) -> bool:
    """Return whether the process lives and is not a later one with the same id."""
    with suppress(psutil.NoSuchProcess):
        return bool(psutil.Process(process_id).create_time() <= moment)
    return False


def writers_below(directories: Sequence[Path], but: int) -> list[psutil.Process]:
    """Return the living processes other than ``but`` that have a file below ``directories`` open for writing.

    Python's resource trackers are left out. Without them, the resources that they remove would stay.
    """
    places = tuple(f"{directory.resolve()}/" for directory in directories)
    found = []
    for process in psutil.process_iter():
        try:
            writes = any(file.path.startswith(places) and file.mode != "r" for file in process.open_files())
            if process.pid != but and writes and not is_tracker(process):
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):  # it ended, or belongs to another user
            continue
    return found


if __name__ == "__main__":
    directories = [Path(directory) for directory in sys.argv[5:]]
    watch(int(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4], directories)
