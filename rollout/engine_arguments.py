"""Engine arguments are looked at once more where the engine starts: it may live without the command's own check."""

from slime_like.checks.engine_arguments import engine_problems
from slime_like.config.rollout import RolloutConfig
from slime_like.errors import EngineError


def check_arguments(engine: str, rollout: RolloutConfig) -> None:
    """Refuse what the engine called ``engine`` cannot be given.

    Raises:
        EngineError: the first problem of ``engine_problems``.
    """
    for problem in engine_problems(engine, rollout):
        raise EngineError(problem)
