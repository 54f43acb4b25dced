"""Trainer backends and rollout engines that are installed, by entry point."""

from slime_like.interfaces.engine import RolloutEngine
from slime_like.interfaces.trainer import TrainerBackend
from slime_like.plugins.entry_points import BACKEND_GROUP, ENGINE_GROUP, load_installed


def load_backend(name: str) -> type[TrainerBackend]:
    """The trainer class registered as ``name``.

    Raises:
        ConfigError: no such entry point; the message lists the known ones.
    """
    return load_installed(BACKEND_GROUP, name, "trainer.backend")


def load_engine(name: str) -> type[RolloutEngine]:
    """The engine class registered as ``name``; raises as ``load_backend``."""
    return load_installed(ENGINE_GROUP, name, "rollout.engine")
