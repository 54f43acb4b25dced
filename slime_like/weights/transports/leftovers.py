"""Files that a session's senders make: their names, and what is removed when a sender has died."""

import re
from collections.abc import Iterable
from pathlib import Path

from slime_like.errors import WeightSyncError

SHARED_MEMORY = Path("/dev/shm")
_MIN_SESSION = 8


def check_session(session: str) -> None:
    """Refuse a session whose name could be that of something else."""
    if len(session) < _MIN_SESSION or not re.fullmatch(r"[A-Za-z0-9_-]+", session):
        raise WeightSyncError(
            f"weight sync session {session!r} is rejected: use at least {_MIN_SESSION} letters, digits, - or _, "
            "unique to the run, because whatever bears this name is removed after it"
        )


def check_name(name: str, session: str) -> None:
    """Refuse a file that is not this session's; names come by RPC."""
    if not name.startswith(f"{session}.") or "/" in name:
        raise WeightSyncError(f"{name} does not belong to weight sync {session}")


def cleanup(session: str, directories: Iterable[Path] = (SHARED_MEMORY,)) -> list[str]:
    """Remove what a dead sender of ``session`` left behind; returns the names removed."""
    check_session(session)
    removed: list[str] = []
    for directory in filter(Path.is_dir, directories):
        left = sorted(path for path in directory.iterdir() if path.name.startswith(f"{session}."))
        for path in left:
            path.unlink(missing_ok=True)
        removed += [path.name for path in left]
    return removed
