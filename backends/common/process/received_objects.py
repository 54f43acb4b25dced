"""Reading of objects from torch's collectives as data, because a stranger's pickle could run code.

Checkpoints of torch and Megatron use these collectives; this project's other values are sent as JSON
(``slime_like.system.json_collectives``).
"""

import pickle
import sys
from collections.abc import Mapping
from pickle import UnpicklingError
from typing import Any, ClassVar

import torch
from torch.distributed import distributed_c10d

DTYPES = frozenset(name for name in dir(torch) if isinstance(getattr(torch, name), torch.dtype))


class ListedUnpickler(pickle.Unpickler):
    """Unpickler of listed classes.

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
    """Make this process's object collectives in torch read only listed classes."""
    assert issubclass(distributed_c10d._unpickler, pickle.Unpickler)
    distributed_c10d._unpickler = _ReceivedUnpickler
