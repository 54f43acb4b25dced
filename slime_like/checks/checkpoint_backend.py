"""Checkpoints that a configuration names: which trainer backend wrote them, and whether they are whole."""

import json
from collections.abc import Iterator
from pathlib import Path

from slime_like.config.run import RunConfig
from slime_like.models.converted import DESCRIPTION, MODEL, WEIGHTS, converted_problem, is_converted

BACKEND = "backend"
"""In a checkpoint's ``state.json``: whose files it holds."""


def backend_problem(checkpoint: Path, backend: str, field: str) -> str | None:
    """That ``backend`` cannot read the checkpoint, in one sentence with its remedy; ``None`` where it can.

    A checkpoint that does not name its backend is accepted: reading it shows the rest.

    Args:
        checkpoint: a run's checkpoints/step-N, or what ``slime-like convert to-megatron`` wrote.
        backend: ``trainer.backend``.
        field: what names the checkpoint, for the sentence.
    """
    wrote = _written_by(checkpoint)
    if wrote is None or wrote == backend:
        return None
    return (
        f"{field}={checkpoint} was written by {wrote}, whose files only it reads, and trainer.backend={backend}; set "
        f"trainer.backend={wrote}, or use its Hugging Face export (`slime-like convert to-hf`)"
    )


def _written_by(checkpoint: Path) -> str | None:
    if (checkpoint / DESCRIPTION).is_file():
        return "megatron"
    try:
        state = json.loads((checkpoint / "state.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    wrote = state.get(BACKEND) if isinstance(state, dict) else None
    return wrote if isinstance(wrote, str) else None


def start_weight_problems(config: RunConfig) -> Iterator[str]:
    weights = config.model.weights
    if weights is not None and not (weights / WEIGHTS).is_dir():
        yield (
            f"model.weights={weights} is not a checkpoint (no trainer/ in it); give what `slime-like convert "
            "to-megatron` wrote, or a run's checkpoints/step-N"
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
