"""Hugging Face's side of ``slime-like convert``, the same for every backend."""

import json
import sys
from abc import abstractmethod
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from backends.common.checkpoint.integrity import ByteRange, ChecksumStream, damage_error
from backends.common.hugging_face.conversion import Conversion, FileJob, common_dtype, hidden_output
from backends.common.hugging_face.directory import (
    copy_companions,
    file_name,
    kept_names,
    restack,
    write_adapter_settings,
    write_index,
)
from backends.common.hugging_face.files import DTYPES, HfCheckpoint, Shape, in_files
from slime_like.config import ModelConfig, TrainerConfig
from slime_like.errors import CheckpointError
from slime_like.interfaces import WeightBucket
from slime_like.interfaces.conversion import (
    ConversionOptions,
    ConversionSummary,
    Converter,
    Report,
    TensorInfo,
    TensorSource,
)
from slime_like.models.converted import leaves_out
from slime_like.models.tower import has_tower
from slime_like.models.weight_files import keeps_type, stored_stacks
from slime_like.system.threads import Tracker
from slime_like.weights.adapter import ADAPTER_FILE, factor_names, with_tower
from slime_like.weights.checksums import as_bytes

_TYPES = {**DTYPES, "I64": torch.int64}
"""Types of a tower's tensors, too."""


class HuggingFaceConverter(Converter):
    """The part of ``Converter`` that is the same for every backend."""

    def __init__(self, model: ModelConfig, trainer: TrainerConfig) -> None:
        self.model, self.trainer = model, trainer

    def open_hugging_face(self, directory: Path) -> TensorSource:
        return HuggingFaceSource(directory, whole=True)

    def open_checkpoint(self, checkpoint: Path) -> TensorSource:
        return self._whole(self._open(checkpoint))

    @abstractmethod
    def _open(self, checkpoint: Path) -> TensorSource:
        """Open the language model, or its factors if ``model.lora`` is set."""

    def _whole(self, source: TensorSource) -> TensorSource:
        path = self.model.path
        if kept_names(path):
            return _Whole(path, source)
        if has_tower(path) or leaves_out(path):
            raise CheckpointError(
                "the model has a vision tower or layers for multi-token prediction, whose tensors are not here",
                code="no-tower",
                who=str(path),
                remedy="give the Hugging Face directory with them as --model.path",
            )
        return source

    def to_hugging_face(
        self, checkpoint: Path, output: Path, options: ConversionOptions, report: Report
    ) -> ConversionSummary:
        source, lora = self._open(checkpoint), self.model.lora
        if options.merge:
            source = _Merged(self.model, self.prove().keys(), source)
        source, is_adapter = self._whole(source), lora.is_set and not options.merge
        kept = [_Group.of(source, [name]) for name in source.kept] if isinstance(source, _Whole) else []
        if not is_adapter:
            source = _Stacked(self.model.path, source)
        wanted = None if options.dtype == "auto" else getattr(torch, options.dtype)
        groups = [_Group.of(source, names, wanted) for names in source.groups]
        for group in groups:
            if group.dtype not in DTYPES.values():
                raise damage_error(
                    checkpoint, f"{next(iter(group.shapes))} has type {group.dtype}, which no weight has"
                )
        jobs = _jobs([*groups, *kept], sys.maxsize if is_adapter else options.max_file_bytes)
        if is_adapter:
            jobs = [replace(job, name=ADAPTER_FILE) for job in jobs]
        with hidden_output(output) as hidden:
            _ToHuggingFace(checkpoint, hidden, options, tensors=source).write_files(jobs, report)
            total = sum(job.nbytes for job in jobs)
            weight_map = {name: job.name for job in jobs for name in job.tensors}
            dtype = common_dtype([(group.dtype, group.nbytes) for group in groups])
            if is_adapter:
                write_adapter_settings(hidden, lora, self.model.path, weight_map)
            else:
                write_index(hidden, weight_map, total)
                copy_companions(self.model.path, hidden, dtype)
        return ConversionSummary(len(weight_map), total, len(jobs))


class HuggingFaceSource:
    """The safetensors files of a directory, for any model.

    Args:
        whole: a language model has its stored names, and the rest of the model is there.
    """

    def __init__(self, directory: Path, whole: bool = False) -> None:
        self._checkpoint = HfCheckpoint(directory)
        if whole:
            self._checkpoint.use_stored_names()
        self.tensors = {}
        for name, shape in self._checkpoint.shapes().items():
            dtype = self._checkpoint.dtype(name)
            self.tensors[name] = TensorInfo(str(_TYPES.get(dtype, dtype)).removeprefix("torch."), shape)

    @property
    def groups(self) -> list[list[str]]:
        return [[name] for name in sorted(self.tensors)]

    def read(self, names: list[str]) -> dict[str, Tensor]:
        return {name: self._checkpoint.read_whole(name) for name in names}


class _Whole(HuggingFaceSource):
    """A language model's tensors under their stored names, and the rest of the model that it was made from.

    Factors get the names that they have in an adapter of the whole model.
    """

    def __init__(self, model: Path, language: TensorSource) -> None:
        super().__init__(model, whole=True)
        stored, self._language = self._checkpoint.stored, language
        of_factors = with_tower if has_tower(model) else str
        self._stored = {name: stored.get(name) or of_factors(name) for name in language.tensors}
        self._own = {name: own for own, name in self._stored.items()}
        self.kept = sorted(self._checkpoint.kept) if language.tensors.keys() <= stored.keys() else []
        kept = {name: self.tensors[name] for name in self.kept}
        self.tensors = {self._stored[name]: info for name, info in language.tensors.items()} | kept

    @property
    def groups(self) -> list[list[str]]:
        """The language model's tensors, grouped by what is read together."""
        return [[self._stored[name] for name in group] for group in self._language.groups]

    def read(self, names: list[str]) -> dict[str, Tensor]:
        if names[0] not in self._own:
            return super().read(names)
        found = self._language.read([self._own[name] for name in names])
        return {self._stored[name]: tensor for name, tensor in found.items()}


class _Stacked:
    """The same tensors, with experts' matrices in stacks if the model at ``path`` stores them so."""

    def __init__(self, path: Path, matrices: TensorSource) -> None:
        self._matrices, self.tensors = matrices, dict(matrices.tensors)
        self._shapes, self._parts = stored_stacks(path)
        self._groups: dict[str, list[list[str]]] = {}
        for group in matrices.groups:
            part = self._parts.get(group[0])
            self._groups.setdefault(part.stack if part else group[0], []).append(group)
            if part:
                infos = [self.tensors.pop(name) for name in group]
                self.tensors[part.stack] = replace(infos[0], shape=self._shapes[part.stack])

    @property
    def groups(self) -> list[list[str]]:
        return [groups[0] if name in groups[0] else [name] for name, groups in self._groups.items()]

    def read(self, names: list[str]) -> dict[str, Tensor]:
        if names[0] in self._matrices.tensors:
            return self._matrices.read(names)
        buckets = (WeightBucket([*self._matrices.read(group).items()]) for group in self._groups[names[0]])
        return {
            name: tensor for bucket in restack(buckets, self._parts, self._shapes) for name, tensor in bucket.tensors
        }


class _Merged(HuggingFaceSource):
    """A model's tensors, with factors merged: in float32, so they are rounded once, when they are written."""

    def __init__(self, model: ModelConfig, names: Collection[str], factors: TensorSource) -> None:
        super().__init__(model.path)
        self._model, self._factors = model, factors
        self._groups = {name: group for group in factors.groups for name in group}
        used = {name: each for name, each in self.tensors.items() if name in names}
        self.tensors = {n: each if keeps_type(n) else replace(each, dtype=model.dtype) for n, each in used.items()}

    def read(self, names: list[str]) -> dict[str, Tensor]:
        return {name: self._merged(name, tensor) for name, tensor in super().read(names).items()}

    def _merged(self, name: str, tensor: Tensor) -> Tensor:
        weight, (a, b) = tensor.to(getattr(torch, self.tensors[name].dtype)), factor_names(name)
        if a not in self._groups:
            return weight
        found = self._factors.read(self._groups[a]) | self._factors.read(self._groups[b])
        return torch.add(weight.float(), found[b].float() @ found[a].float(), alpha=self._model.lora.scale)


# ------------------------------------------------------------------------------------------------------------- writing
@dataclass(frozen=True, slots=True)
class _Group:
    """Tensors that are read together, and the type they are written in."""

    shapes: dict[str, Shape]
    dtype: torch.dtype

    @classmethod
    def of(cls, source: TensorSource, names: Sequence[str], wanted: torch.dtype | None = None) -> Self:
        """Describe tensors that ``source`` reads together, written in the type ``wanted`` unless they keep theirs."""
        stored: torch.dtype = getattr(torch, source.tensors[names[0]].dtype)
        written = stored if wanted is None or keeps_type(names[0]) else wanted
        return cls({name: source.tensors[name].shape for name in names}, written)

    @property
    def nbytes(self) -> int:
        return sum(torch.Size(shape).numel() for shape in self.shapes.values()) * self.dtype.itemsize


def _jobs(groups: Sequence[_Group], max_bytes: int) -> list[FileJob[list[_Group]]]:
    files = in_files(groups, lambda group: group.nbytes, max_bytes)
    # Wide types first, so that every tensor begins at a multiple of its element size.
    ordered = [sorted(file, key=lambda group: -group.dtype.itemsize) for file in files]
    return [
        FileJob(
            file_name(number, len(files)),
            file,
            [name for group in file for name in group.shapes],
            sum(group.nbytes for group in file),
        )
        for number, file in enumerate(ordered, start=1)
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class _ToHuggingFace(Conversion[list[_Group]]):
    tensors: TensorSource

    def _pieces(self, content: list[_Group], stream: ChecksumStream, tracker: Tracker) -> Iterator[ByteRange]:
        stream.write(_header(content))
        yield stream.piece("header")
        for group in content:
            for name, tensor in self.tensors.read(list(group.shapes)).items():
                cast = tensor.to(group.dtype)
                self.faults.note(name, tensor, cast)
                stream.write(as_bytes(cast).numpy().data)
                yield stream.piece(name)
            tracker.advance(group.nbytes)


def _header(groups: list[_Group]) -> bytes:
    """Return a safetensors header: length, names with types, shapes and places, padded to a multiple of 8 bytes."""
    described: dict[str, object] = {"__metadata__": {"format": "pt"}}
    type_names = {dtype: name for name, dtype in _TYPES.items()}
    offset = 0
    for group in groups:
        for name, shape in group.shapes.items():
            end = offset + torch.Size(shape).numel() * group.dtype.itemsize
            described[name] = {"dtype": type_names[group.dtype], "shape": shape, "data_offsets": [offset, end]}
            offset = end
    text = json.dumps(described, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
