"""Configuration for the trainer ranks of a reference worker. Needs no Ray."""

from slime_like.config import RunConfig


def worker_config(config: RunConfig) -> RunConfig:
    """Return the configuration for a worker's trainer ranks, which load the reference as their policy."""
    path, model = config.reference.path, config.model
    if path is not None:
        model = model.model_copy(update={"path": path, "weights": None})
    trainer = config.trainer.model_copy(update={"parallel": config.reference.parallel, "rendezvous_port": None})
    return config.model_copy(update={"model": model, "trainer": trainer})
