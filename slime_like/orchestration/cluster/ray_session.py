"""Files of a Ray session. Logs are kept in the run's directory, everything else is removed.

Ray's token is a secret that the nodes of a run share, in a file that only its owner may read.
"""

import os
import re
import secrets
import shutil
import stat
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from slime_like.errors import LaunchError
from slime_like.system.disk import write_private
from slime_like.system.interrupts import polls
from slime_like.weights.transports.names import SHARED_MEMORY

RAY_DIRECTORY = "r"
"""Name of Ray's directory in the private directory."""
_LOGS = "logs"
_RAY_LOGS = "ray"
_ROLE_LOG = re.compile(r"[a-z]+-[\d-]+(\.\d+)?\.log")
"""Pattern of the log names that ``disk.open_log`` gives to processes of the run."""
_KEPT_STARTS = 10
_REMOVALS = 20
_POLL_S = 0.2
_SHORTEST = 16
_MEETING = "*_" + 32 * "[0-9a-f]"
"""Files with a unique name at which an engine's ranks meet. Their shared memory is named after them. A started engine
removes that memory itself, but one that is killed while starting cannot."""


def make_private(parent: Path) -> Path:
    """Create a directory for all of Ray's files that no other user can enter.

    Ray opens its own directories, including sockets, to every user of the machine. Socket paths must be short.
    """
    parent.mkdir(parents=True, exist_ok=True)
    return Path(tempfile.mkdtemp(prefix="slime-", dir=parent))


def sessions(private: Path) -> list[Path]:
    return list((private / RAY_DIRECTORY).glob("session_[0-9]*"))


def remove_private(private: Path) -> None:
    """Remove the private directory, unless it still has a session's logs."""
    if not sessions(private):
        _remove(private)


def make_room(logs: Path) -> None:
    """Free the name ``logs`` for a new session. Logs of the last starts become ``logs.1``, ``logs.2`` and so on."""
    if logs.is_symlink():
        logs.unlink()
    elif logs.exists():
        names = (path.name.removeprefix(f"{logs.name}.") for path in logs.parent.glob(f"{logs.name}.*"))
        numbers = [int(name) for name in names if name.isdecimal()]
        logs.rename(logs.with_name(f"{logs.name}.{(last := max(numbers, default=0) + 1)}"))
        for number in numbers:
            if number <= last - _KEPT_STARTS:
                shutil.rmtree(logs.with_name(f"{logs.name}.{number}"), ignore_errors=True)


def link_logs(session: Path, logs: Path) -> None:
    logs.symlink_to(session / _LOGS)


def put_away(session: Path, logs: Path) -> None:
    """End a session: move its logs to the link's place, and remove its directory and shared memory.

    Logs of trainer ranks, engines and roles' workers go into ``logs``, Ray's non-empty logs into ``logs/ray``. If
    there is no room, logs and link stay.
    """
    for meeting in session.glob(_MEETING):
        for shared in SHARED_MEMORY.glob(f"{meeting.name}-*"):
            shared.unlink(missing_ok=True)
    if logs.is_symlink() and logs.readlink() == session / _LOGS:
        moving = logs.with_name(f".{logs.name}-moving")
        try:
            shutil.move(session / _LOGS, moving)
        except OSError:  # the run has already ended, and its error matters more
            shutil.rmtree(moving, ignore_errors=True)
            return
        with suppress(OSError):
            _set_ray_logs_apart(moving)
            for path in (moving, *moving.rglob("*")):  # Ray lets other users write
                if not path.is_symlink():
                    path.chmod(path.stat().st_mode & 0o755)
        logs.unlink()
        moving.rename(logs)
    _remove(session)


def _set_ray_logs_apart(logs: Path) -> None:
    rays = [path for path in logs.iterdir() if not _ROLE_LOG.fullmatch(path.name)]
    (logs / _RAY_LOGS).mkdir()
    for path in rays:
        if any(path.iterdir()) if path.is_dir() else path.stat().st_size:
            path.rename(logs / _RAY_LOGS / path.name)
        elif path.is_dir():
            path.rmdir()
        else:
            path.unlink()


def _remove(session: Path) -> None:
    """Remove a directory, with retries: a daemon that is ending may still write a file."""
    for _ in range(_REMOVALS):
        shutil.rmtree(session, ignore_errors=True)
        if not session.exists():
            return
        time.sleep(0.1)


def keep_logs_only(session: Path) -> None:
    """Remove everything of an ended session except its logs."""
    for entry in session.iterdir():
        if entry.is_symlink() or not entry.is_dir():
            entry.unlink(missing_ok=True)
        elif entry.name != _LOGS:
            shutil.rmtree(entry, ignore_errors=True)  # a daemon may be writing


def create_token(path: Path) -> str:
    """Return the token in the file. Node 0 creates a missing file.

    Raises ``LaunchError`` if the file cannot be created, or others may read it.
    """
    try:
        if not path.exists():
            write_private(path, secrets.token_urlsafe(32))
    except OSError as error:
        raise LaunchError(
            f"cannot create the cluster's key {path} ({error.strerror})", code="key-not-made", remedy="give TOKEN_FILE"
        ) from error
    return _read_token(path)


def await_token(path: Path, timeout_s: float, watch: Callable[[], None] = lambda: None) -> str:
    """Wait for node 0 to create the file, and return its token. ``watch`` is called while waiting, and may raise.

    Raises ``LaunchError`` if the file does not appear in time, or others may read it.
    """
    for _ in polls(_POLL_S, timeout_s):
        if path.exists():
            return _read_token(path)
        watch()
    raise LaunchError(
        f"no cluster key {path} within {timeout_s:.0f} s: node 0, which creates it, was not started, or the nodes do "
        "not share this directory",
        code="key-missing",
        remedy="share it, or copy a key to every node and give TOKEN_FILE",
    )


def _read_token(path: Path) -> str:
    about = path.stat()
    if about.st_uid != os.geteuid() or stat.S_IMODE(about.st_mode) & 0o077:
        raise LaunchError(
            f"the cluster's key {path} can be read by other users",
            code="key-unsafe",
            remedy="chown it to you, and chmod 600 it",
        )
    if len(token := path.read_text(encoding="utf-8").strip()) < _SHORTEST:
        raise LaunchError(
            f"the cluster's key {path} is shorter than {_SHORTEST} characters",
            code="key-short",
            remedy="remove it, or write one",
        )
    return token
