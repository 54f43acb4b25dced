"""Finding trainer backends and rollout engines by entry point, so that a user's own package can add one."""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import Any

from slime_like.config import RunConfig
from slime_like.config.dimensions import ModelDimensions
from slime_like.config.entry_points import BACKEND_GROUP, ENGINE_GROUP
from slime_like.errors import ConfigError, EngineError
from slime_like.heap import made_to_stay
from slime_like.hosting.engine import HostedEngine
from slime_like.interfaces import RolloutEngine, TrainerBackend


def load_backend(name: str) -> type[TrainerBackend]:
    """The trainer class registered as ``name``.

    Raises:
        ConfigError: no such entry point; the message lists the known ones.
    """
    return _load(BACKEND_GROUP, name, "trainer.backend")


def load_engine(name: str) -> type[RolloutEngine]:
    """The engine class registered as ``name``; raises as ``load_backend``."""
    return _load(ENGINE_GROUP, name, "rollout.engine")


def engine_class(config: RunConfig) -> type[RolloutEngine]:
    """The class of the run's engines; where they live in another interpreter, the one that stands for it here."""
    return HostedEngine if config.rollout.python is not None else load_engine(config.rollout.engine)


def require_servable(config: RunConfig, on_cuda: bool) -> None:
    """Refuse, before any engine is started, what its class says it cannot do on these devices.

    A class says so by a static method ``refusal(dimensions, on_cuda)``, which it may do without.

    Raises:
        EngineError: with the engine's reason.
    """
    refusal = getattr(load_engine(config.rollout.engine), "refusal", None)
    reason = refusal and refusal(ModelDimensions.from_checkpoint(config.model.path), on_cuda)
    if reason:
        raise EngineError(f"rollout.engine={config.rollout.engine}: {reason}")


def _load(group: str, name: str, field: str) -> Any:
    known = {point.name: point for point in entry_points(group=group)}
    if name not in known:
        raise ConfigError([f"{field}={name} is not installed; known: {', '.join(sorted(known)) or '(none)'}"])
    with made_to_stay():
        return known[name].load()
