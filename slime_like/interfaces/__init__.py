"""The system's interfaces: trainer backend, rollout engine, weights, rewards, environments.

Implementations are found by entry point (groups ``slime_like.backends`` and ``slime_like.engines``), so other packages
can add their own. No module here imports Ray, Megatron or an engine.

Names are imported on first use, so that a reward function that imports ``RewardResult`` from here doesn't pull torch
into the reward workers.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from slime_like.interfaces.engine import *  # noqa: F403
    from slime_like.interfaces.samples import *  # noqa: F403  # noqa: F403
    from slime_like.interfaces.trainer import *  # noqa: F403
    from slime_like.interfaces.user_code import *  # noqa: F403  # noqa: F403
    from slime_like.interfaces.weights import *  # noqa: F403

_MODULES = ("user_code", "samples", "weights", "engine", "trainer")
"""Modules to search for a name. Those without torch come first."""


def __getattr__(name: str) -> Any:
    if not name.startswith("_"):
        for module in _MODULES:
            found = getattr(import_module(f"{__name__}.{module}"), name, None)
            if found is not None:
                return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
