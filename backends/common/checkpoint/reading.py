"""Reading of a training checkpoint's index as data: torch unpickles it with any class it names, and a forgery could run
code. Checksums find damage, but not a forgery with matching checksums.
"""

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from pickle import UnpicklingError
from typing import IO, Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from backends.common.process.agreement import DTYPES, ListedUnpickler
from slime_like.errors import CheckpointError

FORMAT = 1
UNREADABLE = (OSError, RuntimeError, ValueError, EOFError, LookupError, AttributeError, UnpicklingError)
"""Errors that torch, pickle and JSON raise for a file that is missing, cut off or overwritten."""


def brief(error: BaseException) -> str:
    """Return the error's type and its message's first sentence: torch's later sentences are guesses."""
    text = " ".join(str(error).split()).partition(". ")[0]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


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


_INDEX: Mapping[str, frozenset[str]] = {
    "pathlib": frozenset(["PosixPath"]),
    "pathlib._local": frozenset(["PosixPath"]),  # since Python 3.13
    "torch": DTYPES | {"Size"},
    "torch.distributed.checkpoint.filesystem": frozenset(["_StorageInfo"]),
    "torch.distributed.checkpoint.metadata": frozenset([
        "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta",
        "TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
    ]),
    "torch.distributed.checkpoint.planner": frozenset(
        ["BytesIOWriteData", "SavePlan", "TensorWriteData", "WriteItem", "WriteItemType"]
    ),
    "torch.serialization": frozenset(["_get_layout"]),
}  # fmt: skip
"""Full names of the classes in torch's index, by module."""


class _IndexUnpickler(ListedUnpickler):
    whole, listed = "torch's index", _INDEX


def read_index(file: IO[bytes]) -> Metadata:
    """Read torch's index, ``.metadata``.

    Raises:
        UnpicklingError: it is not an index, names anything foreign to torch's index, or its parts do not fit together.
    """
    try:
        index = _IndexUnpickler(file).load()
        if not isinstance(index, Metadata):
            raise UnpicklingError(f"it holds {type(index).__name__} instead of torch's index")
        _require_parts(index)
    except UnpicklingError:
        raise
    except Exception as error:  # a forged pickle, or an object that lacks its fields, may raise anything
        raise UnpicklingError(f"{type(error).__name__}: {error}") from error
    return index


def _require_parts(index: Metadata) -> None:
    """Raise ``UnpicklingError`` unless every entry is valid and has places in data files."""
    entries, places = index.state_dict_metadata, index.storage_data
    if not isinstance(entries, dict) or not isinstance(places, dict):
        raise UnpicklingError("it lists no entries")
    for name, entry in entries.items():
        if not isinstance(name, str) or not (isinstance(entry, BytesStorageMetadata) or _is_tensor(entry)):
            raise UnpicklingError(f"its entry {name!r} does not describe a tensor")
    if not all(_is_place(key, info) for key, info in places.items()):
        raise UnpicklingError("a place in it is invalid")
    stored = {(key.fqn, key.offset): info.length for key, info in places.items()}
    for name, entry in entries.items():
        parts: dict[torch.Size | None, int] = {None: 0}
        if isinstance(entry, TensorStorageMetadata):  # a forged shape must not request more memory than there are bytes
            itemsize = entry.properties.dtype.itemsize
            parts = {chunk.offsets: math.prod(chunk.sizes) * itemsize for chunk in entry.chunks}
        if any(stored.get((name, part), -1) < nbytes for part, nbytes in parts.items()):
            raise UnpicklingError(f"{name} has no place in it, or one that is too small")


def _is_tensor(entry: Any) -> bool:
    """Return whether a tensor's shape is valid, and its pieces are inside it."""
    if not isinstance(entry, TensorStorageMetadata) or not _are_sizes(entry.size):
        return False
    typed = isinstance(entry.properties, TensorProperties) and isinstance(entry.properties.dtype, torch.dtype)
    return typed and isinstance(entry.chunks, list) and all(_is_chunk(chunk, entry.size) for chunk in entry.chunks)


def _is_chunk(chunk: Any, size: torch.Size) -> bool:
    if not (isinstance(chunk, ChunkStorageMetadata) and _are_sizes(chunk.offsets) and _are_sizes(chunk.sizes)):
        return False
    same_rank = len(chunk.offsets) == len(chunk.sizes) == len(size)
    ends = zip(chunk.offsets, chunk.sizes, size, strict=False)
    return same_rank and all(start + length <= end for start, length, end in ends)


def _are_sizes(value: Any) -> bool:
    return isinstance(value, torch.Size) and all(size >= 0 for size in value)


def _is_place(key: Any, info: Any) -> bool:
    """Return whether it describes bytes of a file in the checkpoint's directory."""
    if not (isinstance(key, MetadataIndex) and isinstance(key.fqn, str) and isinstance(info, _StorageInfo)):
        return False
    numbers = (info.offset, info.length)
    return is_file_name(info.relative_path) and all(isinstance(number, int) and number >= 0 for number in numbers)


def is_file_name(name: Any) -> bool:
    """Return whether it names a file in a directory, and nothing outside."""
    return isinstance(name, str) and 0 < len(name) < 256 and name not in (".", "..") and not {"/", "\0"} & {*name}
