"""What is said about a disk that refuses what a run has to write, and about a file that lost bytes since."""

from __future__ import annotations

import shutil
from pathlib import Path


def refusal(path: Path, reason: str) -> str:
    """One sentence: what could not be written, why, how much is free there, and what to do."""
    return (
        f"{path}: could not be written ({reason}; {_room(path)}); free space there, and start again: the run goes on "
        "from its last checkpoint"
    )


def length_fault(found: int, written: int) -> str | None:
    """What is wrong with a file of ``found`` bytes of which ``written`` were written, behind its name."""
    if found == written:
        return None
    if found > written:
        return f"has {found} bytes, though {written} were written"
    return f"is {'cut off' if found else 'empty'}: it has {found} of the {written} bytes that were written"


def _room(path: Path) -> str:
    try:
        usage = shutil.disk_usage(next(place for place in (path, *path.absolute().parents) if place.exists()))
    except OSError as error:  # the disk is gone
        return f"how much is free cannot be told: {error.strerror or error}"
    return f"{usage.free} of {usage.total} bytes are free"
