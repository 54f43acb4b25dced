"""The configuration that engines are given where they work alone. Pure: no Ray."""

from slime_like.config import RunConfig
from slime_like.config.algorithm import AlgorithmConfig
from slime_like.config.model import ReferenceConfig
from slime_like.config.rollout import RolloutConfig, SyncConfig
from slime_like.config.run import DebugConfig
from slime_like.config.trainer import TrainerConfig


def engines_alone(config: RunConfig) -> RunConfig:
    """The run's configuration as engines see it that no trainer shares devices or weights with: they exist whatever the
    run trains and how, on devices that they keep, and batches are not those of a step."""
    trainer = config.trainer
    samples = RolloutConfig.model_fields["samples_per_prompt"].get_default()
    return config.model_copy(
        update={
            "rollout": config.rollout.model_copy(update={"samples_per_prompt": samples}),
            "cluster": config.cluster.model_copy(update={"placement": "separate"}),
            "trainer": TrainerConfig(start_timeout_s=trainer.start_timeout_s, cpu_kernels=trainer.cpu_kernels),
            "reference": ReferenceConfig(),
            "sync": SyncConfig(),
            "algorithm": AlgorithmConfig(),
            "debug": DebugConfig(),
        }
    )
