"""Names of things that are looked up when the run starts."""

from collections.abc import Iterator, Sequence

from slime_like.checks.engine_install import interpreter_problems
from slime_like.config.algorithm import ADVANTAGES, LOSSES
from slime_like.config.run import RunConfig
from slime_like.plugins.entry_points import BACKEND_GROUP, ENGINE_GROUP, installed_names
from slime_like.plugins.import_path import import_path_problem


def backend_name_problems(config: RunConfig) -> Iterator[str]:
    return _unknown("trainer.backend", config.trainer.backend, installed_names(BACKEND_GROUP))


def engine_name_problems(config: RunConfig) -> Iterator[str]:
    """Engines of this environment; those of another are ``interpreter_name_problems``'s."""
    if config.rollout.python is None:
        yield from _unknown("rollout.engine", config.rollout.engine, installed_names(ENGINE_GROUP))


def interpreter_name_problems(config: RunConfig) -> list[str]:
    path = config.rollout.python
    return [] if path is None else interpreter_problems(path, config.rollout.engine)


def loss_name_problems(config: RunConfig) -> Iterator[str]:
    return _unknown_or_not_importable("algorithm.loss", config.algorithm.loss, LOSSES)


def advantage_name_problems(config: RunConfig) -> Iterator[str]:
    return _unknown_or_not_importable("algorithm.advantage", config.algorithm.advantage, ADVANTAGES)


def _unknown_or_not_importable(field: str, name: str, known: Sequence[str]) -> Iterator[str]:
    if ":" not in name:
        yield from _unknown(field, name, known, ", or `package.module:name`")
    elif problem := import_path_problem(name):
        yield f"{field}={name} {problem}"


def _unknown(field: str, name: str, known: Sequence[str], otherwise: str = "") -> Iterator[str]:
    if name not in known:
        yield f"{field}={name} is unknown; use one of: {', '.join(known) or '(none is installed)'}{otherwise}"
