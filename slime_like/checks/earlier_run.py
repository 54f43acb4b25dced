"""What a run takes over from an earlier one: its checkpoint, and which backend wrote that, or its rollouts."""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path

from slime_like.config.run import RunConfig
from slime_like.data.dump_names import rollouts_name
from slime_like.models.converted import DESCRIPTION, MODEL, WEIGHTS, converted_problem, is_converted

BACKEND = "backend"
"""In a checkpoint's ``state.json``: whose files it holds."""

_STATE = "state.json"


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
    if not (checkpoint / _STATE).is_file():
        return None
    try:
        state = json.loads((checkpoint / _STATE).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    wrote = state.get(BACKEND) if isinstance(state, dict) else None
    return wrote if isinstance(wrote, str) else None


def start_weight_problems(config: RunConfig) -> Iterator[str]:
    """Only the backend that wrote a checkpoint reads it."""
    weights = config.model.weights
    if weights is not None and not (weights / WEIGHTS).is_dir():
        yield (
            f"model.weights={weights} is not a checkpoint (no trainer/ in it); give what `slime-like convert "
            "to-megatron` wrote, or a run's checkpoints/step-N"
        )
    elif weights is not None and (problem := backend_problem(weights, config.trainer.backend, "model.weights")):
        yield problem


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


def kept_rollout_problems(config: RunConfig) -> Iterator[str]:
    """Check that the rollouts cover this run's steps. Without an engine nothing can be evaluated."""
    directory = config.debug.load_rollouts
    if directory is None:
        return
    if config.evaluation.files:
        yield (
            f"debug.load_rollouts={directory} starts no engine, so evaluation.files cannot be sampled; set "
            "evaluation.files: none and evaluation.every: 0 (and use slime-like eval on the exported model)"
        )
    if not directory.is_dir():
        yield f"debug.load_rollouts={directory} is not a directory; give one that debug.save_rollouts filled"
        return
    present = {file.name for file in directory.iterdir()}
    missing = [step for step in _trained_steps(config) if rollouts_name(step) not in present]
    if missing:
        yield (
            f"debug.load_rollouts={directory} lacks {rollouts_name(missing[0])}, and every one of steps={config.steps} "
            f"needs one; train for fewer steps, or keep more with debug.save_rollouts"
        )


def _trained_steps(config: RunConfig) -> Iterable[int]:
    """The steps that certainly will be trained: where a checkpoint is gone on from, only the last is certain."""
    fresh = not any((config.run_dir / "checkpoints").glob("step-*"))
    starts_over = config.resume == "never" or (config.resume == "auto" and fresh)
    return range(1 if starts_over else config.steps, config.steps + 1)
