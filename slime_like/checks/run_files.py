"""Checks of a run's files: directories that it writes to, and checkpoints or rollouts of an earlier run."""

import contextlib
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from slime_like.config.run import RunConfig
from slime_like.config.sections import ModelConfig
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
    state: dict[str, Any] = {}
    with contextlib.suppress(OSError, ValueError):
        read = json.loads((checkpoint / "state.json").read_text(encoding="utf-8"))
        state = read if isinstance(read, dict) else {}
    wrote = "megatron" if (checkpoint / DESCRIPTION).is_file() else state.get(BACKEND)
    if wrote in (None, backend):
        problem = facts_problem(state.get(ADAPTER, {}), adapter_facts(model))
        return problem and f"{field}={checkpoint} {problem}"
    return (
        f"{field}={checkpoint} was written by {wrote}, and trainer.backend={backend} cannot read it; set "
        f"trainer.backend={wrote}, or use its Hugging Face export (`slime-like convert to-hf`)"
    )


def start_weight_problems(config: RunConfig) -> Iterator[str]:
    """Check that ``model.weights`` is a checkpoint of this backend and of such factors."""
    model, weights, backend = config.model, config.model.weights, config.trainer.backend
    if weights is not None and not (weights / WEIGHTS).is_dir():
        remedy = "give the output of `slime-like convert to-megatron`, or a run's checkpoints/step-N"
        yield f"model.weights={weights} is not a checkpoint (it has no trainer/); {remedy}"
    elif weights is not None and (problem := checkpoint_problem(weights, model, backend, "model.weights")):
        yield problem


def converted_problems(config: RunConfig) -> Iterator[str]:
    """Check the small files of a converted checkpoint, whether its weights are used or not."""
    path, weights = config.model.path, config.model.weights
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
        remedy = "set evaluation.files: none and evaluation.every: 0, and run slime-like eval on the export"
        yield f"debug.load_rollouts={directory} starts no engine for evaluation.files; {remedy}"
    from slime_like.data.dump import dump_path  # it imports torch

    if not (last := dump_path(directory, config.steps)).is_file():
        remedy = "give a directory that debug.save_rollouts filled, or train for fewer steps"
        yield f"debug.load_rollouts={directory} has no {last.name}, the last of steps={config.steps}; {remedy}"


def run_directory_problems(config: RunConfig) -> Iterator[str]:
    """Check that the run directory is writable and holds one run. A later run may rename it."""
    run_dir = config.run_dir
    place = os.path.realpath(run_dir)  # unlike Path.resolve, it accepts a link to itself
    shared = {os.path.realpath(os.environ.get("HOME", "/")): "your home directory", "/": "the root of the file system"}
    if place in shared:
        yield f"run_dir={run_dir} is {shared[place]}; give a directory in it, such as {Path(place, 'run')}"
    else:
        yield from writable_problems("run_dir", run_dir)


def writable_problems(field: str, directory: Path | None) -> Iterator[str]:
    if directory is not None and (problem := directory_problem(directory)):
        yield f"{field}={directory} {problem}"


def directory_problem(path: Path) -> str | None:
    """Return why nothing can be written to ``path``, as the end of a sentence with its remedy, or ``None``.

    ``path`` need not exist. A temporary directory is created in it or in its nearest existing parent, because
    permissions don't show everything: a read-only file system or ``/proc`` rejects every user.
    """
    try:
        nearest = next(place for place in (path, *path.absolute().parents) if place.exists())
        if not nearest.is_dir():
            where = "is a file" if nearest == path else f"is below the file {nearest}"
            return f"{where}; give a directory"
        Path(tempfile.mkdtemp(prefix=".slime-like-", dir=nearest)).rmdir()
        with contextlib.suppress(FileNotFoundError):
            os.lstat(path)  # the name may be invalid, e.g. too long
    except OSError as error:
        return f"cannot be written to ({error.strerror or error}); give a directory on a writable disk"
    return None
