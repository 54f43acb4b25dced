"""Configuration for the trainer ranks of a role's worker. Needs no Ray."""

from slime_like.config import RunConfig
from slime_like.config.roles import ModelRole


def worker_config(config: RunConfig, role: ModelRole) -> RunConfig:
    """Return the configuration for a worker's trainer ranks, whose modules hold the weights of ``role``."""
    model = config.model
    if role.path is not None:
        model = model.model_copy(update={"path": role.path, "weights": None})
    trainer = config.trainer.model_copy(update={"parallel": role.parallel, "rendezvous_port": None})
    return config.model_copy(update={"model": model, "trainer": trainer})
