"""What ranks tell each other: failures, on which all fail together, and objects, which are read as data."""

import pickle
from collections.abc import Callable, Mapping
from pickle import UnpicklingError
from types import MappingProxyType
from typing import Any, ClassVar, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from slime_like.errors import CheckpointError, TrainerError
from slime_like.system.json_collectives import all_gather_json

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
    if failed.item() < 0:
        return result
    first = int(failed.item())
    reasons = all_gather_json(None if problem is None else str(problem), device)
    if problem is not None:
        raise problem
    raise CheckpointError(
        f"{what} failed on trainer rank {first} ({reasons[first]})",
        code="failed-on-another-rank",
        remedy="see the message of that rank",
    )


def list_by_kind(found: Mapping[str, list[str]]) -> str:
    """List the kinds of faults, each with the affected names; empty if there are none."""
    return "; ".join(f"{kind}: {list_names(names)}" for kind, names in found.items() if names)


def list_names(names: list[str], limit: int = 20) -> str:
    """List names for an error message: all of them, or the first ``limit``."""
    shown = ", ".join(names[:limit])
    return shown if len(names) <= limit else f"{shown}, ... ({len(names)} in all)"


DTYPES = frozenset(name for name in dir(torch) if isinstance(getattr(torch, name), torch.dtype))


class ListedUnpickler(pickle.Unpickler):
    """Unpickler of listed classes, because a stranger's pickle could run code.

    Attributes:
        listed: full names by module. Whole modules would admit callables that call others.
        whole: the data that unlisted classes are not part of, for messages.
    """

    listed: ClassVar[Mapping[str, frozenset[str]]]
    whole: ClassVar[str]

    def find_class(self, module: str, name: str) -> Any:
        if name not in self.listed.get(module, ()):
            raise UnpicklingError(f"it names {module}.{name}, which is not part of {self.whole}")
        return super().find_class(module, name)


class _ReceivedUnpickler(ListedUnpickler):
    """Unpickler of numbers, texts, lists and mappings of them."""

    whole, listed = "what ranks exchange", MappingProxyType({})


def read_plain_objects() -> None:
    """Make this process's object collectives in torch read only plain values.

    Libraries may use them; this project sends its values as JSON (``slime_like.system.json_collectives``).
    """
    assert issubclass(distributed_c10d._unpickler, pickle.Unpickler)
    distributed_c10d._unpickler = _ReceivedUnpickler
