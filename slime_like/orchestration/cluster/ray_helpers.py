"""Patches that keep Ray from starting processes that a run does not need.

Each of these processes imports Ray for itself, and starting Ray waits for the last of them.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import ray
from ray._private import services


@contextmanager
def replaced(module: Any, name: str, value: Any) -> Iterator[None]:
    """Inside, ``module.name`` is ``value``: what Ray reads and has no argument for."""
    usual = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, usual)


@contextmanager
def without_dashboard() -> Iterator[None]:
    """Skip the dashboard's server and agents, which Ray starts even without its pages."""
    with (
        replaced(services, "start_api_server", _no_api_server),
        replaced(ray._private.utils, "get_dashboard_dependency_error", _not_wanted),
    ):
        yield


def _no_api_server(*_: Any, **__: Any) -> tuple[None, None]:
    """Neither an address nor a process."""
    return None, None


def _not_wanted() -> ImportError:
    return ImportError("a run has no dashboard")
