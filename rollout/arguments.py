"""Engine arguments that all engines have in common."""

from collections.abc import Collection

import torch

from slime_like.checks.engine_arguments import engine_problems
from slime_like.config import RunConfig
from slime_like.errors import EngineError

_MOST_SEQUENCES = 512


def on_cpu() -> bool:
    return not torch.cuda.is_available()


def check_arguments(engine: str, config: RunConfig) -> None:
    """Check the configuration again, because an engine may be started without a run.

    Raises:
        EngineError: the first of ``engine_problems``.
    """
    for problem in engine_problems(config, engine):
        raise EngineError(problem, code="engine-arguments")


def check_known(config: RunConfig, known: Collection[str], engine: str, command: str) -> None:
    """Check the names in ``rollout.engine_args``. ``command`` lists the ``known`` ones.

    Raises:
        EngineError: the engine has no such argument.
    """
    for name in config.rollout.own_engine_args:
        if name not in known:
            raise EngineError(
                f"rollout.engine_args.{name}: {engine} has no such argument",
                code="engine-arguments",
                remedy=f"see `{command} --help`",
            )


def sequences_at_once(config: RunConfig) -> int:
    return min(config.rollout.max_concurrent_requests * config.rollout.samples_per_prompt, _MOST_SEQUENCES)


def sleep_mode(config: RunConfig, argument: str) -> bool:
    """Return whether the engine must be able to release its memory: by its ``argument``, else on shared devices."""
    return bool(config.rollout.own_engine_args.get(argument, config.cluster.placement == "colocated"))


def require_sleep_mode(config: RunConfig, argument: str, engine: str) -> None:
    if not sleep_mode(config, argument):
        raise EngineError(
            f"{engine} cannot release its memory",
            code="engine-keeps-memory",
            remedy=f"set cluster.placement=colocated, or rollout.engine_args.{argument}=true",
        )
