"""Engine arguments that all engines have in common."""

import torch

from slime_like.config import ClusterConfig, RolloutConfig
from slime_like.errors import EngineError
from slime_like.interfaces.engine_limits import EngineLimits

_MOST_SEQUENCES = 512


def on_cpu() -> bool:
    return not torch.cuda.is_available()


def check_arguments(limits: EngineLimits, rollout: RolloutConfig) -> None:
    """Check the configuration again, because an engine may be started without a run.

    Raises:
        EngineError: the first of the limits' ``argument_problems``.
    """
    for problem in limits.argument_problems(rollout, is_here=True):
        raise EngineError(problem, code="engine-arguments")


def sequences_at_once(rollout: RolloutConfig) -> int:
    return min(rollout.max_concurrent_requests * rollout.samples_per_prompt, _MOST_SEQUENCES)


def sleep_mode(rollout: RolloutConfig, cluster: ClusterConfig, argument: str) -> bool:
    """Return whether the engine must be able to release its memory: by its ``argument``, else on shared devices."""
    return bool(rollout.own_engine_args.get(argument, cluster.placement == "colocated"))


def require_sleep_mode(rollout: RolloutConfig, cluster: ClusterConfig, argument: str, engine: str) -> None:
    if not sleep_mode(rollout, cluster, argument):
        remedy = f"set cluster.placement=colocated, or rollout.engine_args.{argument}=true"
        raise EngineError(f"{engine} cannot release its memory", code="engine-keeps-memory", remedy=remedy)
