"""Typed configuration. Importing it imports neither torch nor Ray."""

from slime_like.config.algorithm import AlgorithmConfig
from slime_like.config.data import DataConfig, EvaluationConfig
from slime_like.config.model import ModelConfig, ReferenceConfig
from slime_like.config.rollout import RewardConfig, RewardFunction, RolloutConfig, SyncConfig
from slime_like.config.run import (
    CheckpointConfig,
    ClusterConfig,
    DebugConfig,
    LoggingConfig,
    RunConfig,
)
from slime_like.config.trainer import OptimizerConfig, ParallelConfig, TrainerConfig

__all__ = [
    "AlgorithmConfig",
    "CheckpointConfig",
    "ClusterConfig",
    "DataConfig",
    "DebugConfig",
    "EvaluationConfig",
    "LoggingConfig",
    "ModelConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "ReferenceConfig",
    "RewardConfig",
    "RewardFunction",
    "RolloutConfig",
    "RunConfig",
    "SyncConfig",
    "TrainerConfig",
]
