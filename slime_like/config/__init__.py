"""Typed configuration. Importing it imports neither torch nor Ray."""

from slime_like.config.algorithm import AlgorithmConfig as AlgorithmConfig
from slime_like.config.lora import LoraConfig as LoraConfig
from slime_like.config.rollout import RewardConfig as RewardConfig
from slime_like.config.rollout import RewardFunction as RewardFunction
from slime_like.config.rollout import RolloutConfig as RolloutConfig
from slime_like.config.rollout import SyncConfig as SyncConfig
from slime_like.config.run import RunConfig as RunConfig
from slime_like.config.sections import CheckpointConfig as CheckpointConfig
from slime_like.config.sections import ClusterConfig as ClusterConfig
from slime_like.config.sections import DataConfig as DataConfig
from slime_like.config.sections import DebugConfig as DebugConfig
from slime_like.config.sections import EvaluationConfig as EvaluationConfig
from slime_like.config.sections import LoggingConfig as LoggingConfig
from slime_like.config.sections import ModelConfig as ModelConfig
from slime_like.config.sections import ReferenceConfig as ReferenceConfig
from slime_like.config.trainer import OptimizerConfig as OptimizerConfig
from slime_like.config.trainer import ParallelConfig as ParallelConfig
from slime_like.config.trainer import TrainerConfig as TrainerConfig
