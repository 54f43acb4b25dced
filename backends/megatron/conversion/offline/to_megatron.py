"""Conversion of a Hugging Face directory to a Megatron checkpoint, one parameter at a time."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from torch import Tensor

from backends.common.checkpoint.integrity import ChecksumStream, Piece
from backends.common.checkpoint.partial_output import FinishedFile, partial_output
from backends.common.hugging_face.conversion import (
    Conversion,
    FileFaults,
    common_dtype,
    fingerprint,
    in_files,
    refused_by_disk,
)
from backends.common.hugging_face.directory import copy_companions
from backends.common.hugging_face.files import DTYPES, HfCheckpoint
from backends.common.process.agreement import listed
from backends.megatron.conversion.load import open_checked
from backends.megatron.conversion.offline.megatron_files import WrittenFile, write_entry, write_index, write_object
from backends.megatron.conversion.offline.plan import ParameterPlan, RankPlan, plan_ranks
from slime_like.config import RunConfig
from slime_like.errors import CheckpointError
from slime_like.interfaces.conversion import ConversionOptions, ConversionSummary, Report
from slime_like.models.converted import MODEL, WEIGHTS, write_description
from slime_like.models.dimensions import ModelDimensions, keeps_type
from slime_like.system.threads import Tracker


@dataclass(frozen=True, slots=True)
class _Cast:
    """A parameter and the type that it is stored in."""

    plan: ParameterPlan
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return self.plan.placement.parameter.numel() * self.dtype.itemsize

    def entries(self) -> list[ShardedTensor]:
        return self.plan.entries(self.plan.meta(self.dtype))


@dataclass(frozen=True, slots=True)
class _Job:
    """One data file: the parameters that stand in it, and Megatron's objects."""

    name: str
    parameters: Sequence[_Cast]
    objects: Sequence[ShardedObject]

    @property
    def nbytes(self) -> int:
        return sum(cast.nbytes for cast in self.parameters)

    @property
    def tensors(self) -> list[str]:
        return [cast.plan.placement.name for cast in self.parameters]

    def entries(self) -> list[ShardedTensor | ShardedObject]:
        return [*(entry for parameter in self.parameters for entry in parameter.entries()), *self.objects]


def to_megatron(config: RunConfig, output: Path, options: ConversionOptions, report: Report) -> ConversionSummary:
    """See ``Converter.to_checkpoint``."""
    source, dimensions = config.model.path, ModelDimensions.from_checkpoint(config.model.path)
    plans = plan_ranks(config, dimensions)
    with open_checked(source, dimensions, compares_copies=True) as checkpoint:
        jobs = _jobs(plans, _cast_all(plans, checkpoint, options), options.max_file_bytes)
        request = {
            "what": "to-megatron",
            "source": str(source.resolve()),
            "files": fingerprint(source),
            "layout": config.trainer.parallel.model_dump(),
            "dtype": options.dtype,
            "max_file_bytes": options.max_file_bytes,
        }
        with partial_output(output, request) as partial:
            return _convert(config, _ToMegatron(source, partial, options, checkpoint), jobs, report)


def _cast_all(plans: Sequence[RankPlan], checkpoint: HfCheckpoint, options: ConversionOptions) -> list[list[_Cast]]:
    """The type of every rank's parameters: the wanted one, or that of the tensors they are made of, if they keep it.

    Raises:
        CheckpointError: tensors of different types become one tensor (Megatron keeps a kind's layers together).
    """
    wanted = None if options.dtype == "auto" else getattr(torch, options.dtype)
    together: dict[str, dict[str, list[str]]] = {}
    casts: list[list[_Cast]] = []
    for plan in plans:
        casts.append([])
        for parameter in plan.parameters:
            names = parameter.placement.source_names()
            stored = DTYPES[checkpoint.dtype(names[0])]
            if wanted is not None:
                casts[-1].append(_Cast(parameter, stored if keeps_type(names[0]) else wanted))
                continue
            for name in names:
                together.setdefault(parameter.key, {}).setdefault(checkpoint.dtype(name), []).append(name)
            casts[-1].append(_Cast(parameter, stored))
    mixed = {name for types in together.values() if len(types) > 1 for name in min(types.values(), key=len)}
    if mixed:
        raise CheckpointError(
            f"tensors of different types belong together, {listed(sorted(mixed))} and others of their kind",
            code="mixed-dtypes",
            who=str(checkpoint.directory),
            remedy="give --dtype",
        )
    return casts


def _jobs(plans: Sequence[RankPlan], casts: Sequence[list[_Cast]], max_bytes: int) -> list[_Job]:
    jobs = []
    for plan, group in zip(plans, casts, strict=True):
        files = in_files(group, lambda cast: cast.nbytes, max_bytes)
        if plan.objects and not files:
            files = [[]]
        for number, parameters in enumerate(files):
            name = f"{WEIGHTS}/__{plan.rank}_{number}.distcp"
            jobs.append(_Job(name, parameters, plan.objects if number == 0 else ()))
    return jobs


@dataclass(frozen=True, slots=True)
class _ToMegatron(Conversion[_Job]):
    checkpoint: HfCheckpoint

    def _pieces(self, job: _Job, stream: ChecksumStream, faults: FileFaults, tracker: Tracker) -> Iterator[Piece]:
        for cast in job.parameters:
            for entry in cast.plan.entries(self._values(cast, faults)):
                yield write_entry(stream, entry)
            tracker.advance(cast.nbytes)
        for entry in job.objects:
            yield write_object(stream, entry)

    def _values(self, cast: _Cast, faults: FileFaults) -> Tensor:
        values = cast.plan.empty(cast.dtype)
        names = cast.plan.placement.source_names()
        for piece in cast.plan.placement.pieces():
            part = self.checkpoint.read_unchecked(names[piece.source], piece.axis, piece.start, piece.length)
            view = piece.view(values)
            view.copy_(part.view(view.shape))
            faults.note(names[piece.source], part, view)
        return values


def _convert(config: RunConfig, work: _ToMegatron, jobs: Sequence[_Job], report: Report) -> ConversionSummary:
    partial = work.partial
    with refused_by_disk(partial.path):
        (partial.path / WEIGHTS).mkdir(exist_ok=True)
    files, reused = work.write_files(jobs, report)
    _finish(config, work, jobs, files)
    tensors = {name for job in jobs for cast in job.parameters for name in cast.plan.placement.source_names()}
    return ConversionSummary(len(tensors), sum(job.nbytes for job in jobs), len(jobs), reused)


def _finish(config: RunConfig, work: _ToMegatron, jobs: Sequence[_Job], files: dict[str, FinishedFile]) -> None:
    partial = work.partial
    dtype = common_dtype([(cast.dtype, cast.nbytes) for job in jobs for cast in job.parameters])
    with refused_by_disk(partial.path):
        index = [WrittenFile(Path(job.name).name, job.entries(), files[job.name].pieces) for job in jobs]
        write_index(partial.path / WEIGHTS, index)
        (partial.path / MODEL).mkdir(exist_ok=True)
        copy_companions(work.source, partial.path / MODEL, dtype)
        facts = {
            "source": str(work.source.resolve()),
            "dtype": str(dtype).removeprefix("torch."),
            "parallel": config.trainer.parallel.model_dump(),
        }
        write_description(partial.path, facts)
        partial.commit()
