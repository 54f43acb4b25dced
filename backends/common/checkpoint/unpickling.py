"""What torch pickles in a training checkpoint, read as data: a forged pickle would be a program.

torch unpickles its index and the objects beside the tensors with any class that they name. Checksums find damage, not
a forgery that has its own checksums.
"""

import io
from collections.abc import Mapping
from pickle import UnpicklingError
from typing import IO

import torch
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlanner, ReadItem

from backends.common.process.received_objects import DTYPES, ListedUnpickler

_INDEX: Mapping[str, frozenset[str]] = {
    "pathlib": frozenset(["PosixPath"]),
    "pathlib._local": frozenset(["PosixPath"]),  # from Python 3.13 on
    "torch": DTYPES | {"Size"},
    "torch.distributed.checkpoint.filesystem": frozenset(["_StorageInfo"]),
    "torch.distributed.checkpoint.metadata": frozenset(
        [
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorProperties",
            "TensorStorageMetadata",
            "_MEM_FORMAT_ENCODING",
        ]
    ),
    "torch.distributed.checkpoint.planner": frozenset(
        ["BytesIOWriteData", "SavePlan", "TensorWriteData", "WriteItem", "WriteItemType"]
    ),
    "torch.serialization": frozenset(["_get_layout"]),
}
"""Per module, full names of what torch's index consists of."""


class _IndexUnpickler(ListedUnpickler):
    whole, listed = "torch's index", _INDEX


def read_index(file: IO[bytes]) -> Metadata:
    """Read torch's index, ``.metadata``.

    Raises:
        UnpicklingError: it is none, or names anything that torch's index does not consist of.
    """
    index = _IndexUnpickler(file).load()
    if not isinstance(index, Metadata):
        raise UnpicklingError(f"it holds {type(index).__name__} instead of torch's index")
    return index


class DataPlanner:
    """A planner whose objects are data: tensors, numbers, texts, lists and mappings of them.

    It is what torch's reader uses of a ``LoadPlanner``; torch's would unpickle objects with any class.
    """

    def __init__(self, planner: LoadPlanner) -> None:
        self._planner = planner
        self.resolve_tensor = planner.resolve_tensor
        self.commit_tensor = planner.commit_tensor

    def load_bytes(self, item: ReadItem, value: io.BytesIO) -> None:
        """Load an object.

        Raises:
            UnpicklingError: it names a class that torch does not allow in weights.
        """
        try:
            found = torch.load(value, map_location="cpu", weights_only=True)
        except UnpicklingError as error:
            raise UnpicklingError(f"{item.dest_index.fqn} is no plain data") from error
        plain = io.BytesIO()
        torch.save(found, plain)
        plain.seek(0)
        self._planner.load_bytes(item, plain)
