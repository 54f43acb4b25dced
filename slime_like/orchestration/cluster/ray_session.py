"""Files of a Ray session: logs are kept in the run's directory, all else is removed."""

import re
import shutil
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from slime_like.errors import SlimeLikeError
from slime_like.weights.transports.leftovers import SHARED_MEMORY

RAY_DIRECTORY = "r"
"""Name of Ray's directory in the private one."""
_LOGS = "logs"
_RAY_LOGS = "ray"
_ROLE_LOG = re.compile(r"(trainer|engine|reference|reward|environment|agent)-[\d-]+(\.\d+)?\.log")
"""A name that ``disk.open_log`` gives to the output of a process of the run."""
_REMOVALS = 20
_MEETING = "vllm_dist_*"
"""Files at which vLLM's ranks meet; what they share in memory is named after them. An engine that has started removes
that itself, one that was killed while it started cannot."""


def make_private(parent: Path) -> Path:
    """Create a directory that no other user can enter, for everything that Ray writes.

    Ray opens its own directories, sockets among them, to every user of the machine, and paths of sockets must be short.

    Raises:
        SlimeLikeError: ``parent`` refuses it.
    """
    try:
        parent.mkdir(parents=True, exist_ok=True)
        return Path(tempfile.mkdtemp(prefix="slime-", dir=parent))
    except OSError as error:
        problem = f"no directory can be made for Ray's files ({error.strerror})"
        raise SlimeLikeError(
            problem, code="no-ray-directory", who=str(parent), remedy="give another in RAY_TMPDIR"
        ) from error


def sessions(private: Path) -> list[Path]:
    """List the directories of the clusters that were started below ``private``."""
    return list((private / RAY_DIRECTORY).glob("session_[0-9]*"))


def remove_private(private: Path) -> None:
    """Remove it, unless logs of a session could not be put away."""
    if not sessions(private):
        _remove(private)


def make_room(logs: Path) -> None:
    """Let a new session's logs be called ``logs``: those of earlier starts become ``logs.1``, ``logs.2`` and so on."""
    if logs.is_symlink():
        logs.unlink()
    elif logs.exists():
        number = 1
        while (aside := logs.with_name(f"{logs.name}.{number}")).exists():
            number += 1
        logs.rename(aside)


def link_logs(session: Path, logs: Path) -> None:
    """Make the logs of a session findable while it lives."""
    logs.symlink_to(session / _LOGS)


def put_away(session: Path, logs: Path) -> None:
    """End of a session: its logs take the place of the link to them, and its directory and shared memory go.

    Logs of trainer ranks, engines and reference workers stand in ``logs`` itself, those of Ray in ``logs/ray``, without
    the empty ones. If there is no room for them, logs and link stay as they are.
    """
    for meeting in session.glob(_MEETING):
        for shared in SHARED_MEMORY.glob(f"{meeting.name}-*"):
            shared.unlink(missing_ok=True)
    if logs.is_symlink() and logs.readlink() == session / _LOGS:
        moving = logs.with_name(f".{logs.name}-moving")
        try:
            shutil.move(session / _LOGS, moving)
        except OSError:  # the run has ended already, and its error is what counts
            shutil.rmtree(moving, ignore_errors=True)
            return
        with suppress(OSError):
            _set_ray_logs_apart(moving)
            _close_to_others(moving)
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


def _close_to_others(logs: Path) -> None:
    """Take the right to write from other users; Ray gives it."""
    for path in (logs, *logs.rglob("*")):
        if not path.is_symlink():
            path.chmod(path.stat().st_mode & 0o755)


def _remove(session: Path) -> None:
    """Remove it, again if something of it is left: a daemon that ends this moment may still write a file."""
    for _ in range(_REMOVALS):
        shutil.rmtree(session, ignore_errors=True)
        if not session.exists():
            return
        time.sleep(0.1)


def keep_logs_only(session: Path) -> None:
    """Remove everything of an ended session but its logs, which stay where they are."""
    for entry in session.iterdir():
        if entry.is_symlink() or not entry.is_dir():
            entry.unlink(missing_ok=True)
        elif entry.name != _LOGS:
            shutil.rmtree(entry, ignore_errors=True)  # a daemon may be writing
