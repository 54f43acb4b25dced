"""Entry points of trainers and engines: their groups, the installed names, and how to load one."""

import sys
from functools import cache
from importlib.metadata import entry_points
from typing import Any

from slime_like.errors import ConfigError
from slime_like.system.memory import permanent_allocations

BACKEND_GROUP = "slime_like.backends"
ENGINE_GROUP = "slime_like.engines"


def installed_names(group: str) -> list[str]:
    """Return the sorted names registered in ``group``. Nothing is imported."""
    return list(_installed(group, tuple(sys.path)))


@cache
def _installed(group: str, path: tuple[str, ...]) -> tuple[str, ...]:
    """Read a file of every package on ``path``. There are hundreds, so each group is read once."""
    return tuple(sorted({point.name for point in entry_points(group=group)}))


def load_installed(group: str, name: str, field: str) -> Any:
    """Import the object registered as ``name`` in ``group``.

    Raises ``ConfigError`` if the name is not registered. The message names the setting ``field`` and the known names.
    """
    known = {point.name: point for point in entry_points(group=group)}
    if name not in known:
        names = ", ".join(sorted(known)) or "(none)"
        raise ConfigError(f"{field}={name} is not installed; use one of: {names}", code="not-installed")
    with permanent_allocations():
        return known[name].load()
