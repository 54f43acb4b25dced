"""Parts of the engines' arguments that are the same for all."""

from collections.abc import Collection

import torch

from slime_like.checks.engine_arguments import engine_problems
from slime_like.config import RunConfig
from slime_like.errors import EngineError

_MOST_SEQUENCES = 512


def on_cpu() -> bool:
    return not torch.cuda.is_available()


def check_arguments(engine: str, config: RunConfig) -> None:
    """Raise ``EngineError`` with the first problem of ``engine_problems``: an engine may start without its check."""
    for problem in engine_problems(config, engine):
        raise EngineError(problem, code="engine-arguments")


def check_known(config: RunConfig, known: Collection[str], engine: str, command: str) -> None:
    """Raise ``EngineError`` where ``rollout.engine_args`` names none of the engine's ``known`` arguments.

    ``command`` lists them.
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
    """True where the engine must be able to give its memory back; its ``argument`` decides, or a shared device."""
    return bool(config.rollout.own_engine_args.get(argument, config.cluster.placement == "colocated"))


def require_sleep_mode(config: RunConfig, argument: str, engine: str) -> None:
    if not sleep_mode(config, argument):
        raise EngineError(
            f"{engine} cannot give memory back",
            code="engine-keeps-memory",
            remedy=f"set cluster.placement=colocated, or rollout.engine_args.{argument}=true",
        )
