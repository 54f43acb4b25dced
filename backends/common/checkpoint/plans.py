"""torch's plans and results for saving tensors, as plain values that ranks can exchange."""

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult


def plan_to_plain(plan: SavePlan) -> dict[str, Any]:
    """Convert a plan to plain values: its tensor items, and their places in the state.

    Raises:
        TypeError: an item is not a tensor.
    """
    return {"items": [_item_to_plain(item) for item in plan.items], "names": plan.planner_data}


def plan_from_plain(plain: dict[str, Any]) -> SavePlan:
    """Invert ``plan_to_plain``."""
    names = plain["names"]
    paths = None if names is None else {name: tuple(path) for name, path in names.items()}
    return SavePlan([_item_from_plain(*item) for item in plain["items"]], planner_data=paths)


def results_to_plain(results: Sequence[WriteResult]) -> list[Any]:
    """Convert write results to plain values."""
    return [
        [_index_to_plain(one.index), one.size_in_bytes, one.storage_data.relative_path, one.storage_data.offset]
        for one in results
    ]


def results_from_plain(plain: Sequence[Any]) -> list[WriteResult]:
    """Invert ``results_to_plain``."""
    return [
        WriteResult(_index_from_plain(*index), size, _StorageInfo(path, offset, size))
        for index, size, path, offset in plain
    ]


def _item_to_plain(item: WriteItem) -> list[Any]:
    data = item.tensor_data
    if data is None:
        raise TypeError(f"{item.index.fqn} is not a tensor")
    dtype = str(data.properties.dtype).removeprefix("torch.")
    chunk = [list(data.chunk.offsets), list(data.chunk.sizes)]
    return [_index_to_plain(item.index), item.type.name, *chunk, dtype, list(data.size)]


def _item_from_plain(
    index: list[Any], kind: str, offsets: list[int], sizes: list[int], dtype: str, size: list[int]
) -> WriteItem:
    found = getattr(torch, dtype)
    if not isinstance(found, torch.dtype):
        raise TypeError(f"{dtype} is not a tensor type")
    data = TensorWriteData(
        chunk=ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)),
        properties=TensorProperties(dtype=found),
        size=torch.Size(size),
    )
    return WriteItem(index=_index_from_plain(*index), type=WriteItemType[kind], tensor_data=data)


def _index_to_plain(index: MetadataIndex) -> list[Any]:
    return [index.fqn, None if index.offset is None else list(index.offset), index.index]


def _index_from_plain(name: str, offset: list[int] | None, index: int | None) -> MetadataIndex:
    return MetadataIndex(name, None if offset is None else torch.Size(offset), index)
