"""Checks of what a run uses from an earlier one: its checkpoint, or its rollouts."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from slime_like.config.run import RunConfig
from slime_like.config.sections import ModelConfig
from slime_like.config.trainer import TrainerConfig
from slime_like.models.converted import DESCRIPTION, MODEL, WEIGHTS, converted_problem, is_converted
from slime_like.weights.adapter import ADAPTER, adapter_facts, facts_problem

BACKEND, FINGERPRINT = "backend", "model"
"""Keys of the backend and of the model's ``fingerprint`` in a checkpoint's ``state.json``."""


def checkpoint_problem(checkpoint: Path, model: ModelConfig, backend: str, field: str) -> str | None:
    """Return one sentence if another backend wrote the checkpoint, or it has other factors than ``model``, or ``None``.

    A checkpoint that does not name its backend is accepted. Reading it shows whether it fits.

    Args:
        checkpoint: a run's checkpoints/step-N, or output of ``slime-like convert to-megatron``.
        backend: ``trainer.backend``.
        field: name of the checkpoint's setting.
    """
    state = _written(checkpoint)
    wrote = "megatron" if (checkpoint / DESCRIPTION).is_file() else state.get(BACKEND)
    if wrote in (None, backend):
        problem = facts_problem(state.get(ADAPTER, {}), adapter_facts(model))
        return problem and f"{field}={checkpoint} {problem}"
    return (
        f"{field}={checkpoint} was written by {wrote}, and trainer.backend={backend} cannot read it; set "
        f"trainer.backend={wrote}, or use its Hugging Face export (`slime-like convert to-hf`)"
    )


def _written(checkpoint: Path) -> dict[str, Any]:
    """Return the content of the checkpoint's ``state.json``, or nothing if there is none."""
    try:
        state = json.loads((checkpoint / "state.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return state if isinstance(state, dict) else {}


def start_weight_problems(model: ModelConfig, trainer: TrainerConfig) -> Iterator[str]:
    """Check that ``model.weights`` is a checkpoint of this backend and of such factors."""
    weights = model.weights
    if weights is not None and not (weights / WEIGHTS).is_dir():
        yield (
            f"model.weights={weights} is not a checkpoint (it has no trainer/); give the output of `slime-like convert "
            "to-megatron`, or a run's checkpoints/step-N"
        )
    elif weights is not None and (problem := checkpoint_problem(weights, model, trainer.backend, "model.weights")):
        yield problem


def converted_problems(model: ModelConfig) -> Iterator[str]:
    """Check the small files of a converted checkpoint, whether its weights are used or not."""
    path, weights = model.path, model.weights
    named: dict[Path, str] = {}
    if weights is not None and is_converted(weights):
        named[weights.resolve()] = f"model.weights={weights}"
    if path.name == MODEL and (path.resolve().parent / DESCRIPTION).is_file():
        named.setdefault(path.resolve().parent, f"model.path={path} belongs to a checkpoint that")
    for checkpoint, name in named.items():
        if problem := converted_problem(checkpoint):
            yield f"{name} {problem}"


def kept_rollout_problems(config: RunConfig) -> Iterator[str]:
    """Check that saved rollouts reach the last step, and that nothing is evaluated, because no engine starts."""
    directory = config.debug.load_rollouts
    if directory is None:
        return
    if config.evaluation.files:
        yield (
            f"debug.load_rollouts={directory} starts no engine, so evaluation.files cannot be sampled; set "
            "evaluation.files: none and evaluation.every: 0 (and use slime-like eval on the exported model)"
        )
    from slime_like.data.dump import dump_path  # it imports torch

    if not (last := dump_path(directory, config.steps)).is_file():
        yield (
            f"debug.load_rollouts={directory} has no {last.name}, the last of steps={config.steps}; "
            "give a directory that debug.save_rollouts filled, or train for fewer steps"
        )
