"""Names of the entry-point groups in which trainers and engines are found, and of what is installed in them."""

from __future__ import annotations

from importlib.metadata import entry_points

BACKEND_GROUP = "slime_like.backends"
ENGINE_GROUP = "slime_like.engines"


def installed_names(group: str) -> list[str]:
    """Sorted names registered in ``group``; nothing is imported."""
    return sorted({point.name for point in entry_points(group=group)})
