"""Scored trajectories on disk: the rollouts of a step, to train on again without engines."""

from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from pickle import UnpicklingError

import torch

from slime_like.errors import DataError
from slime_like.trajectory import ScoredTrajectory

_VERSION = 1
_DAMAGE = (UnpicklingError, RuntimeError, EOFError, OSError, LookupError, TypeError, ValueError, AttributeError)
"""Errors that torch or the trajectory constructor raises on a file of another kind."""
_SAVE_AGAIN = "save it again with debug.save_rollouts"
_RENAMED = {"set_apart": "chosen_tokens"}
"""Fields under another name in older files."""
_FIELDS = tuple(field.name for field in fields(ScoredTrajectory) if field.init)


def dump_path(directory: Path, step: int) -> Path:
    return directory / f"step-{step:06d}.pt"


def save_step(directory: Path, step: int, trajectories: Sequence[ScoredTrajectory]) -> None:
    """Write the rollouts of a step to their file in ``directory``."""
    save_trajectories(dump_path(directory, step), trajectories)


def save_trajectories(path: Path, trajectories: Sequence[ScoredTrajectory]) -> None:
    """Write only plain tensors, numbers and text, so the file can be read without trusting it."""
    rows = [{name: getattr(trajectory, name) for name in _FIELDS} for trajectory in trajectories]
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    torch.save({"version": _VERSION, "trajectories": rows}, partial)
    partial.replace(path)


def load_trajectories(path: Path) -> list[ScoredTrajectory]:
    """Read a file written by ``save_trajectories``; every field is equal.

    Raises ``DataError`` if the file is missing, damaged, or of another format version.
    """
    if not path.is_file():
        remedy = "debug.load_rollouts needs one file per step, from step 1 on"
        raise DataError("no such rollout dump", code="no-dump", who=str(path), remedy=remedy)
    try:
        content = torch.load(path, weights_only=True)
        if content["version"] != _VERSION:
            problem = f"rollout dump of version {content['version']}, this program reads {_VERSION}"
            raise DataError(problem, code="dump-version", who=str(path))
        trajectories = [
            ScoredTrajectory(**{_RENAMED.get(name, name): value for name, value in row.items()})
            for row in content["trajectories"]
        ]
    except _DAMAGE as error:
        reason = str(error).partition("\n")[0].partition(". ")[0]  # the rest is advice on trusting the file
        problem = f"damaged rollout dump ({type(error).__name__}: {reason})"
        raise DataError(problem, code="damaged-dump", who=str(path), remedy=_SAVE_AGAIN) from error
    if not trajectories:
        raise DataError("holds no trajectory", code="empty-dump", who=str(path), remedy=_SAVE_AGAIN)
    return trajectories
