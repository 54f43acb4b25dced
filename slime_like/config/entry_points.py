"""Names of the entry-point groups in which trainers and engines are found, and of what is installed in them."""

from __future__ import annotations

import sys
from functools import cache
from importlib.metadata import entry_points

BACKEND_GROUP = "slime_like.backends"
ENGINE_GROUP = "slime_like.engines"


def installed_names(group: str) -> list[str]:
    """Sorted names registered in ``group``; nothing is imported."""
    return list(_installed(group, tuple(sys.path)))


@cache
def _installed(group: str, path: tuple[str, ...]) -> tuple[str, ...]:
    """A file of every package on ``path`` is read, hundreds of them: once for a group."""
    return tuple(sorted({point.name for point in entry_points(group=group)}))
