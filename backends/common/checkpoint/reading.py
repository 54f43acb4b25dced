"""Faults found while reading a training checkpoint, as sentences."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

from torch.distributed.checkpoint.api import CheckpointException

from slime_like.errors import CheckpointError

FORMAT = 1
UNREADABLE = (OSError, RuntimeError, ValueError, EOFError, LookupError, AttributeError, UnpicklingError)
"""Errors that torch, pickle and JSON raise for a file that is missing, cut off or overwritten."""


def cause_of(error: BaseException) -> BaseException:
    """Return a rank's error, which torch wraps; raise it if it is a ``CheckpointError``."""
    cause = next(iter(error.failures.values()))[0] if isinstance(error, CheckpointException) else error
    if isinstance(cause, CheckpointError):
        raise cause from error
    return cause


def brief(error: BaseException) -> str:
    """Return the error's type and its message's first sentence: torch's later sentences are guesses."""
    text = " ".join(str(error).split()).partition(". ")[0]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def require_format(directory: Path, common: Mapping[str, Any]) -> None:
    """Reject a checkpoint's plain values if they have another format."""
    if common.get("format") != FORMAT:
        raise CheckpointError(
            f"has checkpoint format {common.get('format')}, but this version reads {FORMAT}",
            code="checkpoint-format",
            who=str(directory),
            remedy="load it with the version that wrote it and export a Hugging Face model",
        )


def require_schedule(directory: Path, saved: Mapping[str, Any], now: Mapping[str, Any], keys: Iterable[str]) -> None:
    """Reject a checkpoint that was trained with other values of the schedule's ``keys``."""
    differing = [f"{key} {saved.get(key)} (now {now.get(key)})" for key in keys if saved.get(key) != now.get(key)]
    if differing:
        raise CheckpointError(
            f"was trained with another learning-rate schedule: {', '.join(differing)}",
            code="checkpoint-schedule",
            who=str(directory),
            remedy="use the same steps and trainer.optimizer settings, or set checkpoint.override: [schedule]",
        )
