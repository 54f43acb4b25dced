"""The interfaces of the system: trainer backend, rollout engine, weights, rewards, environments, conversion.

Implementations are found by entry point (groups ``slime_like.backends`` and ``slime_like.engines``), so that a custom
package can add one. No module here imports Ray, Megatron or an engine.
"""

from slime_like.interfaces.engine import (
    ConversationTask,
    EngineHealth,
    Generation,
    GenerationRequest,
    PauseMode,
    RolloutEngine,
    SamplingParams,
)
from slime_like.interfaces.environment import Environment, Step, Task
from slime_like.interfaces.installed import load_backend, load_engine
from slime_like.interfaces.reward import RewardResult, group_reward
from slime_like.interfaces.trainer import RankCoordinates, RankPlacement, ScoredLogprobs, TrainerBackend
from slime_like.interfaces.weights import BucketFigures, BucketMetadata, TensorEntry, UpdateReceipt, WeightBucket
from slime_like.plugins.entry_points import BACKEND_GROUP, ENGINE_GROUP
from slime_like.trajectory import Conversation

__all__ = [
    "BACKEND_GROUP",
    "ENGINE_GROUP",
    "BucketFigures",
    "BucketMetadata",
    "Conversation",
    "ConversationTask",
    "EngineHealth",
    "Environment",
    "Generation",
    "GenerationRequest",
    "PauseMode",
    "RankCoordinates",
    "RankPlacement",
    "RewardResult",
    "RolloutEngine",
    "SamplingParams",
    "ScoredLogprobs",
    "Step",
    "Task",
    "TensorEntry",
    "TrainerBackend",
    "UpdateReceipt",
    "WeightBucket",
    "group_reward",
    "load_backend",
    "load_engine",
]
