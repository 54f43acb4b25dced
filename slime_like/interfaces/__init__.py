"""The system's interfaces: trainer backend, rollout engine, weights, rewards, environments.

Implementations are found by entry point (groups ``slime_like.backends`` and ``slime_like.engines``), so other packages
can add their own. No module here imports Ray, Megatron or an engine.

Names are imported on first use, so that a reward function that imports ``RewardResult`` from here doesn't pull torch
into the reward workers.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from slime_like.interfaces.agent import Agent as Agent
    from slime_like.interfaces.agent import AgentResult as AgentResult
    from slime_like.interfaces.agent import AgentTask as AgentTask
    from slime_like.interfaces.engine import ConversationTask as ConversationTask
    from slime_like.interfaces.engine import EngineHealth as EngineHealth
    from slime_like.interfaces.engine import Generation as Generation
    from slime_like.interfaces.engine import GenerationRequest as GenerationRequest
    from slime_like.interfaces.engine import PauseMode as PauseMode
    from slime_like.interfaces.engine import RequestBatch as RequestBatch
    from slime_like.interfaces.engine import RolloutEngine as RolloutEngine
    from slime_like.interfaces.engine import SamplingParams as SamplingParams
    from slime_like.interfaces.engine import Segment as Segment
    from slime_like.interfaces.engine import load_engine as load_engine
    from slime_like.interfaces.environment import Environment as Environment
    from slime_like.interfaces.environment import Step as Step
    from slime_like.interfaces.environment import Task as Task
    from slime_like.interfaces.prompt import PromptInput as PromptInput
    from slime_like.interfaces.reward import RewardResult as RewardResult
    from slime_like.interfaces.reward import group_reward as group_reward
    from slime_like.interfaces.supports import Supports as Supports
    from slime_like.interfaces.trainer import PendingSave as PendingSave
    from slime_like.interfaces.trainer import Planner as Planner
    from slime_like.interfaces.trainer import RankCoordinates as RankCoordinates
    from slime_like.interfaces.trainer import RankPlacement as RankPlacement
    from slime_like.interfaces.trainer import Scores as Scores
    from slime_like.interfaces.trainer import TrainerBackend as TrainerBackend
    from slime_like.interfaces.trainer import load_backend as load_backend
    from slime_like.interfaces.weights import BucketMetadata as BucketMetadata
    from slime_like.interfaces.weights import Manifest as Manifest
    from slime_like.interfaces.weights import TensorEntry as TensorEntry
    from slime_like.interfaces.weights import UpdateReceipt as UpdateReceipt
    from slime_like.interfaces.weights import WeightBucket as WeightBucket
    from slime_like.interfaces.weights import WeightExport as WeightExport
    from slime_like.plugins.resolve import BACKEND_GROUP as BACKEND_GROUP
    from slime_like.plugins.resolve import ENGINE_GROUP as ENGINE_GROUP
    from slime_like.trajectory import Conversation as Conversation

_OF_USERS = {
    **dict.fromkeys(("Agent", "AgentResult", "AgentTask"), "agent"),
    **dict.fromkeys(("Environment", "Step", "Task"), "environment"),
    **dict.fromkeys(("RewardResult", "group_reward"), "reward"),
}
"""Modules of the names that users' code imports; none needs torch."""
_MODULES = ("prompt", "supports", "weights", "engine", "trainer")
"""Modules to search for all other names."""


def __getattr__(name: str) -> Any:
    if not name.startswith("_"):
        for module in (_OF_USERS[name],) if name in _OF_USERS else _MODULES:
            found = getattr(import_module(f"{__name__}.{module}"), name, None)
            if found is not None:
                return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
