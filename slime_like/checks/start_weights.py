"""Weights that training starts from instead of ``model.path``'s, and what ``slime-like convert`` wrote beside them."""

from collections.abc import Iterator
from pathlib import Path

from slime_like.checks.checkpoint_backend import backend_problem
from slime_like.config.run import RunConfig
from slime_like.models.converted import DESCRIPTION, MODEL, WEIGHTS, converted_problem, is_converted


def start_weight_problems(config: RunConfig) -> Iterator[str]:
    weights = config.model.weights
    if weights is not None and not (weights / WEIGHTS).is_dir():
        yield (
            f"model.weights={weights} is no checkpoint (no trainer/ in it); give what `slime-like convert to-megatron` "
            "wrote, or a run's checkpoints/step-N"
        )


def weight_backend_problems(config: RunConfig) -> Iterator[str]:
    """Only the backend that wrote a checkpoint reads it."""
    weights = config.model.weights
    if weights is not None and (weights / WEIGHTS).is_dir():
        problem = backend_problem(weights, config.trainer.backend, "model.weights")
        yield from () if problem is None else (problem,)


def converted_problems(config: RunConfig) -> Iterator[str]:
    """Damage to the small files of what `slime-like convert to-megatron` wrote, whether its weights are used or not."""
    path, weights = config.model.path, config.model.weights
    named: dict[Path, str] = {}
    if weights is not None and is_converted(weights):
        named[weights.resolve()] = f"model.weights={weights}"
    if path.name == MODEL and (path.resolve().parent / DESCRIPTION).is_file():
        named.setdefault(path.resolve().parent, f"model.path={path} belongs to a checkpoint that")
    for checkpoint, name in named.items():
        problem = converted_problem(checkpoint)
        if problem is not None:
            yield f"{name} {problem}"
