"""The class of a run's engines, and whether it can serve the model."""

from slime_like.config import RunConfig
from slime_like.errors import EngineError
from slime_like.hosting.hosted_engine import HostedEngine
from slime_like.interfaces import RolloutEngine
from slime_like.interfaces.installed import load_engine
from slime_like.models.dimensions import ModelDimensions


def engine_class(config: RunConfig) -> type[RolloutEngine]:
    """The class of the run's engines; where they live in another interpreter, the one that stands for it here."""
    return HostedEngine if config.rollout.python is not None else load_engine(config.rollout.engine)


def require_servable(config: RunConfig, on_cuda: bool) -> None:
    """Reject a model that the engine's class does not support on these devices, before any engine is started.

    The class may have a static method ``refusal(dimensions, on_cuda)`` that returns the reason.

    Raises:
        EngineError: with the engine's reason.
    """
    refusal = getattr(load_engine(config.rollout.engine), "refusal", None)
    reason = refusal and refusal(ModelDimensions.from_checkpoint(config.model.path), on_cuda)
    if reason:
        raise EngineError(reason, code="model-not-servable", who=f"rollout.engine={config.rollout.engine}")
