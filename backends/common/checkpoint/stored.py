"""Reading of a training checkpoint in torch's format, by any number of ranks, in any layout.

Every piece is compared with its checksum before it is used. Checksums find damage, but not a forgery with matching
checksums: torch unpickles its index with any class it names, so index and pieces are read as data here.
"""

import contextlib
import io
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from pickle import UnpicklingError
from typing import IO, Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from backends.common.checkpoint.integrity import Checksums, damage_error, is_file_name
from backends.common.checkpoint.writing import Part, Shape
from backends.common.process.agreement import DTYPES, ListedUnpickler, list_by_kind
from slime_like.errors import CheckpointError
from slime_like.system.heartbeat import beat

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


INDEX = ".metadata"


class StoredTensors:
    """The tensors and plain values of a checkpoint. Safe to share between threads.

    Opening reads only small files, and verifies them.

    Args:
        plain_files: further files with checksums.
        read_common: reads the plain values in the directory.

    Attributes:
        tensors: torch's description of every tensor, by name.
        common: the plain values.

    Raises:
        CheckpointError: the checkpoint is incomplete, damaged, or has another format.
    """

    def __init__(self, directory: Path, plain_files: Sequence[str], read_common: Callable[[Path], Any]) -> None:
        self.directory = Path(directory)
        self.checksums = Checksums.read(self.directory)
        self.checksums.verify_plain_files((INDEX, *plain_files))
        self.checksums.verify_lengths()
        try:
            self.common = read_common(self.directory)
            with (self.directory / INDEX).open("rb") as file:
                index = read_index(file)
        except UNREADABLE as error:
            raise damage_error(self.directory, brief(error)) from error
        if not isinstance(self.common, dict):
            raise damage_error(self.directory, "its plain values are not a mapping")
        if self.common.get("format") != FORMAT:
            raise CheckpointError(
                f"has checkpoint format {self.common.get('format')}, but this version reads {FORMAT}",
                code="checkpoint-format",
                who=str(self.directory),
                remedy="load it with the version that wrote it and export a Hugging Face model",
            )
        self._places = index.storage_data
        self.checksums.require_files({info.relative_path for info in self._places.values()})
        entries = index.state_dict_metadata.items()
        self.tensors = {name: entry for name, entry in entries if isinstance(entry, TensorStorageMetadata)}
        for name, entry in self.tensors.items():
            elements, stored = math.prod(entry.size), sum(math.prod(chunk.sizes) for chunk in entry.chunks)
            if stored != elements:
                raise damage_error(self.directory, f"{name}: {stored} of {elements} elements are stored")
        self._near: dict[str, tuple[int, dict[Shape, list[ChunkStorageMetadata]]]] = {}

    def dtype(self, name: str) -> torch.dtype:
        """Return the type that a tensor is stored in."""
        dtype: torch.dtype = self.tensors[name].properties.dtype
        return dtype

    def require(
        self, wanted: Mapping[str, tuple[Shape, bool]], ignored: tuple[str, ...] = (), settings: str = "model.path"
    ) -> None:
        """Reject a checkpoint unless it has exactly the ``wanted`` tensors.

        Args:
            wanted: by name, a tensor's shape, and whether its rows are padded, so that their number may differ.
            ignored: beginnings of names that need not be wanted.
            settings: what the user should check.
        """
        present = {name for name in self.tensors if not name.startswith(ignored)}
        wrong = []
        for name in sorted(present & wanted.keys()):
            found, (shape, is_padded) = tuple(self.tensors[name].size), wanted[name]
            if found[is_padded:] != tuple(shape)[is_padded:] or len(found) != len(shape):
                wrong.append(f"{name} is {list(found)}, not {list(shape)}")
        problems = {
            "missing": sorted(wanted.keys() - present),
            "unexpected": sorted(present - wanted.keys()),
            "wrong shape": wrong,
        }
        if any(problems.values()):
            raise CheckpointError(
                f"belongs to another model; {list_by_kind(problems)}",
                code="checkpoint-of-another-model",
                who=str(self.directory),
                remedy=f"use the {settings} that wrote it",
            )

    @torch.no_grad()
    def read(self, parts: Iterable[Part]) -> None:
        """Fill the memory of ``parts``, cast to its type. Not collective.

        Raises:
            CheckpointError: bytes that differ from what was written, or are missing.
        """
        with contextlib.ExitStack() as stack:
            files: dict[str, IO[bytes]] = {}

            def load(index: MetadataIndex) -> Any:
                name = self._places[index].relative_path
                if name not in files:
                    files[name] = stack.enter_context((self.directory / name).open("rb"))
                return self._load(files[name], index)

            for part in parts:
                try:
                    self._fill(part, load)
                except UNREADABLE as error:
                    raise damage_error(self.directory, f"{part.name}: {brief(error)}") from error

    def read_object(self, name: str) -> Any:
        """Read a stored object, which consists of tensors, numbers, texts, lists and mappings."""
        index = MetadataIndex(name)
        try:
            with (self.directory / self._places[index].relative_path).open("rb") as file:
                return self._load(file, index)
        except UNREADABLE as error:
            raise damage_error(self.directory, f"{name}: {brief(error)}") from error

    def _fill(self, part: Part, load: Callable[[MetadataIndex], Tensor]) -> None:
        beat()
        tensor, copied = self.tensors[part.name], 0
        ours = ChunkStorageMetadata(torch.Size(part.offset), part.data.shape)
        near = TensorStorageMetadata(tensor.properties, tensor.size, self._chunks(part))
        for item in create_read_items_for_chunk_list(part.name, near, [ours]):
            piece = _within(load(item.storage_index), item.storage_offsets, item.lengths)
            _within(part.data, item.dest_offsets, item.lengths).copy_(piece)
            copied += piece.numel()
        wanted = part.data.numel()
        if part.is_padded:
            rows = len(part.data)
            wanted = wanted // rows * max(0, min(tensor.size[0] - part.offset[0], rows))
        if copied != wanted:
            raise damage_error(self.directory, f"{part.name}: {copied} of {wanted} elements are stored")

    def _chunks(self, part: Part) -> list[ChunkStorageMetadata]:
        """Return the stored boxes that may overlap a part. A tensor may have thousands, one for every layer and expert:
        they are looked up by their place along the first axes, if all boxes have one entry there."""
        every = self.tensors[part.name].chunks
        if part.name not in self._near:
            axes, near = 0, dict[Shape, list[ChunkStorageMetadata]]()
            while axes < len(part.shape) and all(chunk.sizes[axes] == 1 for chunk in every):
                axes += 1
            for chunk in every:
                near.setdefault(tuple(chunk.offsets[:axes]), []).append(chunk)
            self._near[part.name] = axes, near
        axes, near = self._near[part.name]
        is_one = all(size == 1 for size in part.data.shape[:axes])
        return near.get(tuple(part.offset[:axes]), []) if is_one else every

    def _load(self, file: IO[bytes], index: MetadataIndex) -> Any:
        place = self._places[index]
        file.seek(place.offset)
        content = file.read(place.length)
        self.checksums.verify_bytes(content, place.relative_path, place.offset)
        found = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
        if index.offset is not None:
            described = self.tensors[index.fqn]
            if not isinstance(found, Tensor) or found.dtype != described.properties.dtype:
                raise damage_error(self.directory, f"{index.fqn}: a piece is not a tensor of {self.dtype(index.fqn)}")
        return found


def _within(tensor: Tensor, offsets: Sequence[int], lengths: Sequence[int]) -> Tensor:
    return tensor[tuple(slice(start, start + length) for start, length in zip(offsets, lengths, strict=True))]
