"""Code shared by transports: checks, and removal of the files that a session's dead senders left behind."""

import re
from collections.abc import Iterable
from pathlib import Path

from slime_like.errors import WeightSyncError

SHARED_MEMORY = Path("/dev/shm")
_MIN_SESSION = 8


def check_session(session: str) -> None:
    """Reject a session name that could match unrelated files."""
    if len(session) < _MIN_SESSION or not re.fullmatch(r"[A-Za-z0-9_-]+", session):
        raise WeightSyncError(
            f"weight sync session {session!r} is rejected: use at least {_MIN_SESSION} letters, digits, - or _, "
            "unique to the run, because files with this name are removed after it",
            code="session-name",
        )


def check_name(name: str, session: str) -> None:
    """Reject a file that does not belong to this session; names arrive by RPC."""
    if not name.startswith(f"{session}.") or "/" in name:
        raise WeightSyncError(f"{name} does not belong to weight sync {session}", code="foreign-bucket")


def buckets_in_flight(sender: str) -> WeightSyncError:
    return WeightSyncError(
        "two buckets are in flight", code="buckets-in-flight", who=f"weight sync {sender}", remedy="release one first"
    )


def cleanup(session: str, directories: Iterable[Path] = (SHARED_MEMORY,)) -> list[str]:
    """Remove files left behind by a dead sender of ``session``; return their names."""
    check_session(session)
    removed: list[str] = []
    for directory in filter(Path.is_dir, directories):
        left = sorted(path for path in directory.iterdir() if path.name.startswith(f"{session}."))
        for path in left:
            path.unlink(missing_ok=True)
        removed += [path.name for path in left]
    return removed
