"""Reading of a training checkpoint in torch's format, by any number of ranks, in any layout.

Every piece is compared with its checksum before it is used, and read as data: nothing is executed.
"""

import contextlib
import io
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from backends.common.checkpoint.integrity import Checksums, damage_error
from backends.common.checkpoint.reading import FORMAT, UNREADABLE, brief, read_index
from backends.common.checkpoint.writing import Part, Shape
from backends.common.process.agreement import list_by_kind
from slime_like.errors import CheckpointError

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
