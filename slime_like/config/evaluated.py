"""The part of a configuration that ``slime-like eval`` uses."""

from __future__ import annotations

from slime_like.config.algorithm import AlgorithmConfig
from slime_like.config.model import ReferenceConfig
from slime_like.config.rollout import SyncConfig
from slime_like.config.run import CheckpointConfig, DebugConfig, LoggingConfig, RunConfig
from slime_like.config.trainer import TrainerConfig

_OF_TRAINING_ROLLOUTS = (
    "prompts_per_step", "samples_per_prompt", "temperature", "top_p", "top_k", "max_staleness", "stream", "oversample",
    "drop_zero_spread", "max_drops_per_step",
)  # fmt: skip


def for_evaluation(config: RunConfig) -> RunConfig:
    """The same evaluation, with defaults wherever only training looks: nothing is checked that is not used, and a run's
    own file can be evaluated with, whatever it trains and how."""
    rollout = config.rollout
    defaults = {name: type(rollout).model_fields[name].get_default() for name in _OF_TRAINING_ROLLOUTS}
    return config.model_copy(
        update={
            "steps": RunConfig.model_fields["steps"].get_default(),
            "resume": "auto",
            "data": config.data.model_copy(update={"train": ()}),
            "evaluation": config.evaluation.model_copy(update={"every": 0}),
            "rollout": rollout.model_copy(update=defaults),
            "cluster": config.cluster.model_copy(update={"placement": "separate"}),
            "trainer": TrainerConfig(start_timeout_s=config.trainer.start_timeout_s),
            "logging": LoggingConfig(tensorboard=False),
            "reference": ReferenceConfig(),
            "sync": SyncConfig(),
            "algorithm": AlgorithmConfig(),
            "checkpoint": CheckpointConfig(),
            "debug": DebugConfig(),
        }
    )
