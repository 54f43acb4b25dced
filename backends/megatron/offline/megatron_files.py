"""Megatron's distributed checkpoint format (torch_dist) on disk, written and read entry by entry."""

import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO, Any, cast

import torch
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from torch import Tensor
from torch.distributed.checkpoint import FileSystemWriter
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
from torch.distributed.checkpoint.storage import WriteResult

from backends.common.checkpoint.integrity import ByteRange, Checksums, ChecksumStream, VerifyingReader, damage_error
from backends.common.checkpoint.reading import FORMAT, UNREADABLE, brief
from backends.common.process.agreement import list_by_kind
from backends.megatron.checkpoint_writer import PLAIN_FILES
from backends.megatron.families.transforms import Shape
from backends.megatron.offline.plan import ParameterPlan
from slime_like.errors import CheckpointError


# ------------------------------------------------------------------------------------------------------------- writing
def write_entry(stream: ChecksumStream, entry: ShardedTensor) -> ByteRange:
    """Write one tensor in the form that torch's and Megatron's readers expect."""
    data = entry.data.contiguous()
    if data.untyped_storage().nbytes() != data.nbytes:
        data = data.clone()  # torch would save all memory behind a view
    torch.save(data.view(_chunk_shape(entry)), cast(IO[bytes], stream))
    return stream.piece(entry.key)


def write_object(stream: ChecksumStream, entry: ShardedObject) -> ByteRange:
    buffer = io.BytesIO()
    torch.save([entry.data], buffer)
    with buffer.getbuffer() as view:
        stream.write(view)
    return stream.piece(entry.unique_key)


def write_index(
    directory: Path, files: Iterable[tuple[str, Sequence[ShardedTensor | ShardedObject], Sequence[ByteRange]]]
) -> None:
    """Complete a checkpoint: write torch's metadata, Megatron's metadata, and the checksums.

    Args:
        files: name of every data file, with its entries and their pieces.

    Raises:
        OSError: the disk rejected the write.
    """
    metadata: dict[str, Any] = {}
    results: list[WriteResult] = []
    written: dict[str, Sequence[ByteRange]] = {}
    for name, entries, pieces in files:
        written[name] = pieces
        for entry, piece in zip(entries, pieces, strict=True):
            info = _StorageInfo(name, piece.offset, piece.length)
            index = _described(metadata, entry)
            results.append(WriteResult(index=index, size_in_bytes=piece.length, storage_data=info))
    FileSystemWriter(directory).finish(Metadata(metadata), [results])
    save_config(CheckpointingConfig("torch_dist", 1), str(directory))
    torch.save({"format": FORMAT}, directory / "common.pt")
    Checksums.of_directory(directory, written, PLAIN_FILES).write()


def _described(metadata: dict[str, Any], entry: ShardedTensor | ShardedObject) -> MetadataIndex:
    """Add an entry to the metadata and return its index."""
    if isinstance(entry, ShardedObject):
        metadata[entry.unique_key] = BytesStorageMetadata()
        return MetadataIndex(entry.unique_key)
    described = metadata.setdefault(
        entry.key, TensorStorageMetadata(TensorProperties(dtype=entry.dtype), torch.Size(entry.global_shape), [])
    )
    offsets = torch.Size(entry.global_offset)
    described.chunks.append(ChunkStorageMetadata(offsets, torch.Size(_chunk_shape(entry))))
    return MetadataIndex(entry.key, offsets, len(described.chunks) - 1)


def _chunk_shape(entry: ShardedTensor) -> Shape:
    return (1,) * entry.prepend_axis_num + tuple(entry.local_shape)


# ------------------------------------------------------------------------------------------------------------- reading
class MegatronCheckpoint:
    """The model's tensors in a checkpoint that a run or a conversion wrote, under any layout.

    Opening reads only the index. Every piece is compared with its checksum on reading. Safe to share between threads.

    Args:
        plans: the model's parameters, as one rank holds them.

    Raises:
        CheckpointError: incomplete, damaged, or of another model; lists the tensors.
    """

    def __init__(self, directory: Path, plans: Sequence[ParameterPlan]) -> None:
        self.directory = Path(directory)
        self._checksums = Checksums.read(self.directory)
        self._checksums.verify_plain_files(PLAIN_FILES)
        self._checksums.verify_lengths()
        try:
            metadata = VerifyingReader(self.directory, self._checksums).read_metadata()
        except UNREADABLE as error:
            raise damage_error(self.directory, f".metadata cannot be read: {type(error).__name__}") from error
        self._tensors: dict[str, TensorStorageMetadata] = {
            key: value
            for key, value in metadata.state_dict_metadata.items()
            if isinstance(value, TensorStorageMetadata)
        }
        expected = {entry.key: entry for plan in plans for entry in plan.entries()}
        self._require(expected)
        self._storage: Mapping[MetadataIndex, _StorageInfo] = metadata.storage_data or {}
        # By tensor, layer and expert, each of which is an axis.
        self._chunks: dict[tuple[str, Shape], list[ChunkStorageMetadata]] = {}
        for key, entry in expected.items():
            for chunk in self._tensors[key].chunks:
                self._chunks.setdefault((key, tuple(chunk.offsets[: entry.prepend_axis_num])), []).append(chunk)

    def _require(self, expected: Mapping[str, ShardedTensor]) -> None:
        present = {key for key in self._tensors if not key.startswith("optimizer.")}
        problems = {
            "missing": sorted(expected.keys() - present),
            "unexpected": sorted(present - expected.keys()),
            "wrong shape": self._wrong_shapes(expected.values()),
        }
        if any(problems.values()):
            raise CheckpointError(
                f"the tensors do not match the model's config.json; {list_by_kind(problems)}",
                code="checkpoint-of-another-model",
                who=str(self.directory),
                remedy="give the --model.path that wrote it",
            )

    def _wrong_shapes(self, entries: Iterable[ShardedTensor]) -> list[str]:
        wrong = []
        for entry in entries:
            if entry.key not in self._tensors:
                continue
            found, wanted = tuple(self._tensors[entry.key].size), tuple(entry.global_shape)
            # The number of padding rows depends on the layout that wrote it.
            first = 1 if entry.allow_shape_mismatch else 0
            if found[first:] != wanted[first:]:
                wrong.append(f"{entry.key} is {list(found)}, not {list(wanted)}")
        return wrong

    def dtype(self, plan: ParameterPlan) -> torch.dtype:
        """Return the type that the parameter is stored in."""
        dtype: torch.dtype = self._tensors[plan.key].properties.dtype
        return dtype

    def read(self, plan: ParameterPlan) -> Tensor:
        """Read one whole parameter in its stored type.

        Raises:
            CheckpointError: its bytes are damaged or incomplete.
        """
        values = replace(plan, dtype=self.dtype(plan)).empty()
        try:
            for entry in plan.entries(values):
                self._read_into(entry)
        except UNREADABLE as error:
            raise damage_error(self.directory, f"{plan.key}: {brief(error)}") from error
        return values

    def _read_into(self, entry: ShardedTensor) -> None:
        prepended, described = entry.prepend_axis_num, self._tensors[entry.key]
        target = entry.data.view(_chunk_shape(entry))
        rows = target.shape[prepended]
        wanted = target.numel() // max(1, rows) * min(described.size[prepended], rows)
        copied = 0
        ours = ChunkStorageMetadata(torch.Size(entry.global_offset), target.shape)
        near = self._chunks.get((entry.key, tuple(entry.global_offset[:prepended])), [])
        for item in create_read_items_for_chunk_list(entry.key, replace(described, chunks=near), [ours]):
            part = _within(self._load(item.storage_index), item.storage_offsets, item.lengths)
            _within(target, item.dest_offsets, item.lengths).copy_(part)
            copied += part.numel()
        if copied != wanted:
            raise damage_error(self.directory, f"{entry.key}: {copied} of {wanted} elements are stored")

    def _load(self, index: MetadataIndex) -> Tensor:
        info = self._storage[index]
        with (self.directory / info.relative_path).open("rb") as file:
            file.seek(info.offset)
            content = file.read(info.length)
        self._checksums.verify_bytes(content, info.relative_path, info.offset)
        tensor: Tensor = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
        if tensor.dtype != (dtype := self._tensors[index.fqn].properties.dtype):
            raise damage_error(self.directory, f"{index.fqn}: a piece is {tensor.dtype}, not {dtype}")
        return tensor


def _within(tensor: Tensor, offsets: Sequence[int], lengths: Sequence[int]) -> Tensor:
    return tensor[tuple(slice(start, start + length) for start, length in zip(offsets, lengths, strict=True))]
