"""All ranks fail together: a fault on one rank must not leave the others waiting in a collective."""

from collections.abc import Callable, Mapping
from typing import TypeVar

import torch
import torch.distributed as dist

from slime_like.errors import CheckpointError, TrainerError

Result = TypeVar("Result")


def rank_error(phase: str, problem: str, *, code: str, remedy: str) -> TrainerError:
    """Return an error of this rank."""
    return TrainerError(problem, code=code, who=f"rank {dist.get_rank()}", phase=phase, remedy=remedy)


def together(action: Callable[[], Result], what: str, device: torch.device) -> Result:
    """Run ``action`` on every rank of the world. Collective.

    Raises:
        CheckpointError: this rank's error, or one that names the rank that failed.
    """
    problem: CheckpointError | None = None
    try:
        result = action()
    except CheckpointError as error:
        problem = error
    failed = torch.full((1,), -1 if problem is None else dist.get_rank(), device=device)
    dist.all_reduce(failed, op=dist.ReduceOp.MAX)
    if problem is not None:
        raise problem
    if failed.item() >= 0:
        raise CheckpointError(
            f"{what} failed on trainer rank {int(failed.item())}",
            code="failed-on-another-rank",
            remedy="see the message of that rank",
        )
    return result


def listed_by_kind(found: Mapping[str, list[str]]) -> str:
    """List the kinds of faults, each with the affected names; empty if there are none."""
    return "; ".join(f"{kind}: {listed(names)}" for kind, names in found.items() if names)


def listed(names: list[str], limit: int = 20) -> str:
    """List names for an error message: all of them, or the first ``limit``."""
    shown = ", ".join(names[:limit])
    return shown if len(names) <= limit else f"{shown}, ... ({len(names)} in all)"
