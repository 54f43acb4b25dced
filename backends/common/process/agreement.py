"""What ranks tell each other: failures, on which all fail together, and objects, which are read as data."""

import pickle
import sys
from collections.abc import Callable, Mapping
from pickle import UnpicklingError
from typing import Any, ClassVar, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

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
    """Unpickler that also reads errors of any imported class, because ranks raise each other's errors."""

    whole = "what ranks exchange"
    listed: ClassVar[Mapping[str, frozenset[str]]] = {
        "builtins": frozenset(["slice"]),
        "megatron.core.dist_checkpointing.mapping": frozenset(["ShardedObject", "ShardedTensor"]),
        "torch": DTYPES | {"Size"},
        "torch.distributed.checkpoint.filesystem": frozenset(["_StorageInfo"]),
        "torch.distributed.checkpoint.metadata": frozenset([
            "ChunkStorageMetadata", "MetadataIndex", "TensorProperties", "_MEM_FORMAT_ENCODING",
        ]),
        "torch.distributed.checkpoint.planner": frozenset([
            "BytesIOWriteData", "LoadItemType", "LoadPlan", "ReadItem",
            "SavePlan", "TensorWriteData", "WriteItem", "WriteItemType",
        ]),
        "torch.distributed.checkpoint.storage": frozenset(["WriteResult"]),
        "torch.serialization": frozenset(["_get_layout"]),
        "traceback": frozenset(["FrameSummary", "StackSummary"]),
    }  # fmt: skip

    def find_class(self, module: str, name: str) -> Any:
        found = getattr(sys.modules.get(module), name, None)
        if isinstance(found, type) and issubclass(found, BaseException):
            return found
        return super().find_class(module, name)


def read_listed_objects() -> None:
    """Make this process's object collectives in torch read only listed classes.

    Checkpoints of torch and Megatron use them; this project's other values are sent as JSON
    (``slime_like.system.json_collectives``).
    """
    assert issubclass(distributed_c10d._unpickler, pickle.Unpickler)
    distributed_c10d._unpickler = _ReceivedUnpickler
