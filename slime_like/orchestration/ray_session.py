"""What a Ray session of our own leaves on disk: its logs are kept in the run's directory, all else is removed."""

from __future__ import annotations

import shutil
from pathlib import Path

_LOGS = "logs"


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
    """End of a session: its logs take the place of the link to them, and its directory goes.

    If there is no room for them, logs and link stay as they are.
    """
    if logs.is_symlink() and logs.readlink() == session / _LOGS:
        moving = logs.with_name(f".{logs.name}-moving")
        try:
            shutil.move(session / _LOGS, moving)
        except OSError:  # the run has ended already, and its own error is what counts
            shutil.rmtree(moving, ignore_errors=True)
            return
        logs.unlink()
        moving.rename(logs)
    shutil.rmtree(session, ignore_errors=True)  # a daemon that ends this moment may still write a file


def keep_logs_only(session: Path) -> None:
    """End of a session whose logs stay where they are."""
    for entry in session.iterdir():
        if entry.name == _LOGS:
            continue
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry, ignore_errors=True)  # as above
        else:
            entry.unlink(missing_ok=True)
