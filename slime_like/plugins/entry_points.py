"""Entry points: the groups of trainers and engines, the names installed in them, and loading one."""

import sys
from functools import cache
from importlib.metadata import entry_points
from typing import Any

from slime_like.errors import ConfigError
from slime_like.system.memory import permanent_allocations

BACKEND_GROUP = "slime_like.backends"
ENGINE_GROUP = "slime_like.engines"


def installed_names(group: str) -> list[str]:
    """Sorted names registered in ``group``; nothing is imported."""
    return list(_installed(group, tuple(sys.path)))


@cache
def _installed(group: str, path: tuple[str, ...]) -> tuple[str, ...]:
    """A file of every package on ``path`` is read, hundreds of them: once for a group."""
    return tuple(sorted({point.name for point in entry_points(group=group)}))


def load_installed(group: str, name: str, field: str) -> Any:
    """The object registered as ``name`` in ``group``, imported.

    Raises ``ConfigError`` with the setting ``field`` and the known names where there is none.
    """
    known = {point.name: point for point in entry_points(group=group)}
    if name not in known:
        names = ", ".join(sorted(known)) or "(none)"
        raise ConfigError(f"{field}={name} is not installed; known: {names}", code="not-installed")
    with permanent_allocations():
        return known[name].load()
