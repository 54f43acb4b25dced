"""From a Megatron checkpoint of any layout to a Hugging Face directory, one parameter at a time."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from backends.megatron.conversion.export import merge_shards
from backends.megatron.conversion.hf_files import INDEX, holds_nan
from backends.megatron.conversion.offline.megatron_files import MegatronCheckpoint
from backends.megatron.conversion.offline.output import FinishedFile, PartialOutput, partial_output
from backends.megatron.conversion.offline.plan import ParameterPlan, plan_ranks
from backends.megatron.conversion.offline.request import (
    TYPE_NAMES,
    common_dtype,
    fingerprint,
    in_files,
    refused_by_disk,
    require_no_nan,
    write_files,
    written,
)
from backends.megatron.conversion.save import copy_companions
from backends.megatron.conversion.transforms import Shape
from backends.megatron.integrity import ChecksumStream
from slime_like.config import ParallelConfig, RunConfig
from slime_like.config.dimensions import ModelDimensions
from slime_like.conversion import ConversionOptions, ConversionSummary, Report
from slime_like.jobs import Tracker


def whole_parameters(config: RunConfig, dimensions: ModelDimensions) -> list[ParameterPlan]:
    """Every parameter that is exported, as one rank alone has it."""
    alone = config.model_copy(update={"trainer": config.trainer.model_copy(update={"parallel": ParallelConfig()})})
    (plan,) = plan_ranks(alone, dimensions)
    return [parameter for parameter in plan.parameters if parameter.placement.rule.exported]


def hugging_face_tensors(plan: ParameterPlan, values: Tensor) -> dict[str, Tensor]:
    """A whole parameter's tensors under Hugging Face's names; views where nothing has to move."""
    return dict(zip(plan.placement.source_names(), merge_shards(plan.placement, [values]), strict=True))


@dataclass(frozen=True, slots=True)
class _Cast:
    plan: ParameterPlan
    dtype: torch.dtype

    @property
    def shapes(self) -> dict[str, Shape]:
        return dict(zip(self.plan.placement.source_names(), self.plan.placement.shapes, strict=True))

    @property
    def nbytes(self) -> int:
        return sum(torch.Size(shape).numel() for shape in self.shapes.values()) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class _Job:
    name: str
    parameters: Sequence[_Cast]

    @property
    def nbytes(self) -> int:
        return sum(own.nbytes for own in self.parameters)

    @property
    def shapes(self) -> dict[str, Shape]:
        return {name: shape for own in self.parameters for name, shape in own.shapes.items()}


def to_hugging_face(
    config: RunConfig, checkpoint: Path, output: Path, options: ConversionOptions, report: Report
) -> ConversionSummary:
    """See ``Converter.to_hugging_face``."""
    plans = whole_parameters(config, ModelDimensions.from_checkpoint(config.model.path))
    source = MegatronCheckpoint(checkpoint, plans)
    wanted = None if options.dtype == "auto" else getattr(torch, options.dtype)
    casts = [_Cast(plan, wanted or source.dtype(plan)) for plan in plans]
    jobs = _jobs(casts, options.max_file_bytes)
    request = {
        "what": "to-hf",
        "source": str(checkpoint.resolve()),
        "files": fingerprint(checkpoint),
        "dtype": options.dtype,
        "max_file_bytes": options.max_file_bytes,
    }
    with partial_output(output, request) as partial:
        return _convert(config, _Work(source, partial, options), jobs, report)


def _jobs(casts: Sequence[_Cast], max_bytes: int) -> list[_Job]:
    files = in_files(casts, lambda cast: cast.nbytes, max_bytes)
    names = [f"model-{number:05d}-of-{len(files):05d}.safetensors" for number in range(1, len(files) + 1)]
    if len(files) == 1:
        names = ["model.safetensors"]
    # Wide types first: every tensor then begins at a multiple of its own type.
    ordered = [sorted(file, key=lambda cast: -cast.dtype.itemsize) for file in files]
    return [_Job(name, file) for name, file in zip(names, ordered, strict=True)]


@dataclass(frozen=True, slots=True)
class _Work:
    source: MegatronCheckpoint
    partial: PartialOutput
    options: ConversionOptions

    def write(self, job: _Job, tracker: Tracker) -> FinishedFile:
        """Read, arrange and write one file; durable when this returns."""
        nan: list[str] = []
        with written(self.partial.path / job.name, list(job.shapes)) as file:
            stream = ChecksumStream(file)
            stream.write(_header(job))
            pieces = [stream.piece("header")]
            for own in job.parameters:
                for name, tensor in hugging_face_tensors(own.plan, self.source.read(own.plan)).items():
                    if holds_nan(tensor):
                        nan.append(name)
                    stream.write(_bytes(tensor.to(own.dtype)))
                    pieces.append(stream.piece(name))
                tracker.advance(own.nbytes)
            file.flush()
            os.fsync(file.fileno())
        return FinishedFile(job.name, tuple(pieces), tuple(nan))


def _header(job: _Job) -> bytes:
    """The safetensors format: length, names with types, shapes and places, filled up to a multiple of 8 bytes."""
    described: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for own in job.parameters:
        for name, shape in own.shapes.items():
            end = offset + torch.Size(shape).numel() * own.dtype.itemsize
            described[name] = {"dtype": TYPE_NAMES[own.dtype], "shape": shape, "data_offsets": [offset, end]}
            offset = end
    text = json.dumps(described, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _bytes(tensor: Tensor) -> memoryview:
    return tensor.contiguous().flatten().view(torch.uint8).numpy().data


def _convert(config: RunConfig, work: _Work, jobs: Sequence[_Job], report: Report) -> ConversionSummary:
    partial = work.partial
    files, reused = write_files(partial, jobs, work.write, work.options.workers, report)
    require_no_nan(list(files.values()), work.source.directory, work.options)
    total = sum(job.nbytes for job in jobs)
    weight_map = {name: job.name for job in jobs for name in job.shapes}
    with refused_by_disk(partial.path):
        if len(jobs) > 1:
            index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
            (partial.path / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
        dtype = common_dtype([(own.dtype, own.nbytes) for job in jobs for own in job.parameters])
        copy_companions(config.model.path, partial.path, dtype)
        partial.commit()
    return ConversionSummary(len(weight_map), total, len(jobs), reused)
