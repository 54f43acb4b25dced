"""Megatron's side of ``slime-like convert``, in both directions, one parameter at a time.

The stored tensors of every rank of a layout are computed in one process, without memory or messages.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory, is_main_replica
from torch import Tensor

from backends.common.checkpoint.integrity import ByteRange, ChecksumStream
from backends.common.checkpoint.writing import Box, Part, write_index, write_part
from backends.common.hugging_face.conversion import Conversion, FileJob, common_dtype, hidden_output
from backends.common.hugging_face.converter import HuggingFaceConverter
from backends.common.hugging_face.directory import copy_companions
from backends.common.hugging_face.files import DTYPES, HfCheckpoint, in_files
from backends.common.process.agreement import list_names
from backends.megatron.checkpoint import OPTIMIZER, Sharded, open_stored, parts_of, plain_files
from backends.megatron.conversion.export import merge_shards
from backends.megatron.conversion.placement import (
    PlacedParameter,
    named_weights,
    open_checked,
    place_lora_weights,
    place_parameters,
)
from backends.megatron.families import family_of
from backends.megatron.families.transforms import Shape
from backends.megatron.lora import lora_entries
from backends.megatron.model import build_meta_chunks
from backends.megatron.parallel import alone_as
from slime_like.config import LoraConfig, ModelConfig, ParallelConfig, TrainerConfig
from slime_like.errors import CheckpointError
from slime_like.interfaces.conversion import ConversionOptions, ConversionSummary, Report, TensorInfo, TensorSource
from slime_like.models.converted import KEPT, MODEL, WEIGHTS, write_description
from slime_like.models.dimensions import ModelDimensions
from slime_like.models.weight_files import keeps_type
from slime_like.system.threads import Tracker
from slime_like.weights.adapter import factor_shapes


@dataclass(frozen=True, slots=True)
class ParameterPlan:
    """One rank's parameter, and its place in the checkpoint.

    Attributes:
        placement: its Hugging Face tensors. Its parameter has only a shape.
        sharded: Megatron's description of its entries in the checkpoint.
        dtype: stored type.
    """

    placement: PlacedParameter
    sharded: Sharded
    dtype: torch.dtype = torch.float32

    @property
    def key(self) -> str:
        """Name of the tensor on disk, which holds this parameter for all layers if the layers are alike."""
        key: str = self.sharded.key
        return key

    @property
    def nbytes(self) -> int:
        return self.placement.parameter.numel() * self.dtype.itemsize

    def empty(self) -> Tensor:
        """Allocate memory for the parameter. Only vocabulary padding is initialized, to zero."""
        pads = self.placement.rule.transform.pads
        return (torch.zeros if pads else torch.empty)(self.placement.parameter.shape, dtype=self.dtype)

    def parts(self, values: Tensor | None = None) -> list[Part]:
        """List its parts on disk. Their data are views of ``values`` or, without ``values``, shapes only."""
        if values is None:
            values = torch.empty(self.placement.parameter.shape, dtype=self.dtype, device="meta")
        changes = {} if isinstance(self.sharded, ShardedTensorFactory) else {"dtype": values.dtype}
        return [*parts_of(replace(self.sharded, data=values, **changes))]


@dataclass(frozen=True, slots=True)
class RankPlan:
    """Files of one rank: the parameters whose main copy it holds."""

    rank: int
    parameters: tuple[ParameterPlan, ...]


def plan_ranks(model: ModelConfig, trainer: TrainerConfig, dimensions: ModelDimensions) -> list[RankPlan]:
    """Plan every rank of ``trainer.parallel``: weights, or factors if ``model.lora`` is set. The plans provably hold
    every tensor element exactly once.

    Raises:
        CheckpointError: the rules of the model's family do not cover the model.
    """
    # Local layers have the canonical names, and need neither CUDA nor Transformer Engine.
    local = trainer.model_copy(update={"attention": "ring"})
    plans = [_plan_rank(model, local, dimensions, rank) for rank in range(trainer.parallel.world_size)]
    shapes = family_of(dimensions).hf_shapes(dimensions)
    require_exactly_once(plans, factor_shapes(model.lora, shapes) if model.lora.is_set else shapes)
    return plans


def _plan_rank(model: ModelConfig, trainer: TrainerConfig, dimensions: ModelDimensions, rank: int) -> RankPlan:
    parameters: list[ParameterPlan] = []
    is_adapter = model.lora.is_set
    with alone_as(trainer, rank):
        for chunk in build_meta_chunks(model, trainer, dimensions):
            group = parallel_state.get_data_parallel_group(with_context_parallel=True)
            state: dict[str, Any] = chunk.sharded_state_dict(metadata={"dp_cp_group": group})
            state, place = (lora_entries(chunk, state), place_lora_weights) if is_adapter else (state, place_parameters)
            main = {name: value for name, value in state.items() if is_main_replica(value.replica_id)}
            placements = {id(placed.parameter): placed for placed in place([chunk], dimensions)}
            parameters += [
                ParameterPlan(placements[id(parameter)], main[name])
                for name, parameter in named_weights(chunk)
                if name in main
            ]
    return RankPlan(rank, tuple(parameters))


def require_exactly_once(plans: Sequence[RankPlan], shapes: Mapping[str, Shape]) -> None:
    """Require exactly one place for every element of every tensor, on either side. ``shapes`` are Hugging Face's."""
    ranges: dict[str, list[tuple[int, int]]] = {name: [] for name in shapes}
    cut_axis: dict[str, int] = {}
    stored: dict[str, list[tuple[tuple[int, ...], int]]] = {}
    sizes: dict[str, tuple[int, ...]] = {}
    for parameter in (parameter for plan in plans for parameter in plan.parameters):
        names = parameter.placement.source_names()
        for piece in parameter.placement.pieces():
            ranges[names[piece.source]].append((piece.start, piece.length))
            cut_axis[names[piece.source]] = piece.axis
        for part in parameter.parts():
            stored.setdefault(part.name, []).append((part.offset, part.data.numel()))
            sizes[part.name] = part.shape
    wrong = [name for name, spans in ranges.items() if not _tile(spans, shapes[name][cut_axis.get(name, 0)])]
    wrong += [key for key, spans in stored.items() if not _fill(spans, torch.Size(sizes[key]).numel())]
    if wrong:
        problem = f"tensors with elements that have no place, or two: {list_names(sorted(wrong))}"
        raise CheckpointError(problem, code="no-conversion-rule")


def _tile(ranges: list[tuple[int, int]], length: int) -> bool:
    """Return whether (start, length) ranges cover 0 to ``length`` without gaps or overlaps."""
    end = 0
    for start, size in sorted(ranges):
        if start != end:
            return False
        end += size
    return end == length


def _fill(entries: list[tuple[tuple[int, ...], int]], numel: int) -> bool:
    """Return whether entries on one grid have distinct places and together contain all elements."""
    return len({offset for offset, _ in entries}) == len(entries) and sum(size for _, size in entries) == numel


class MegatronConverter(HuggingFaceConverter):
    """See ``slime_like.interfaces.conversion.Converter``."""

    @property
    def _base(self) -> ModelConfig:
        """The model without factors."""
        return self.model.model_copy(update={"lora": LoraConfig()})

    def prove(self) -> dict[str, tuple[int, ...]]:
        dimensions, layout = ModelDimensions.from_checkpoint(self.model.path), self.trainer.parallel
        # The fewest ranks that hold every shard: only replicas that experts are spread over.
        fewest = {"context": 1, "data": layout.expert // math.gcd(layout.expert, layout.tensor)}
        trainer = self.trainer.model_copy(update={"parallel": layout.model_copy(update=fewest)})
        plan_ranks(self._base, trainer, dimensions)
        return {name: tuple(shape) for name, shape in family_of(dimensions).hf_shapes(dimensions).items()}

    def to_checkpoint(self, output: Path, options: ConversionOptions, report: Report) -> ConversionSummary:
        return to_megatron(self._base, self.trainer, output, options, report)

    def _open(self, checkpoint: Path) -> TensorSource:
        return MegatronSource(self.model, self.trainer, checkpoint)


class MegatronSource:
    """A Megatron checkpoint, of factors if ``model.lora`` is set. Tensors of one parameter are read together."""

    def __init__(self, model: ModelConfig, trainer: TrainerConfig, checkpoint: Path) -> None:
        one_rank = trainer.model_copy(update={"parallel": ParallelConfig()})
        dimensions = ModelDimensions.from_checkpoint(model.path)
        (plan,) = plan_ranks(model, one_rank, dimensions)
        plans = [parameter for parameter in plan.parameters if parameter.placement.rule.exported]
        self._stored = open_stored(checkpoint)
        parts = (part for plan in plans for part in plan.parts())
        self._stored.require({part.name: (part.shape, part.is_padded) for part in parts}, (OPTIMIZER,))
        self._plans = {plan.placement.source_names()[0]: plan for plan in plans}
        self.tensors = {
            name: TensorInfo(str(self._stored.dtype(plan.key)).removeprefix("torch."), shape)
            for plan in plans
            for name, shape in zip(plan.placement.source_names(), plan.placement.shapes, strict=True)
        }

    @property
    def groups(self) -> list[list[str]]:
        return [plan.placement.source_names() for plan in self._plans.values()]

    def read(self, names: list[str]) -> dict[str, Tensor]:
        """Read tensors. ``names`` must be one of ``groups``."""
        plan = self._plans[names[0]]
        values = replace(plan, dtype=self._stored.dtype(plan.key)).empty()
        self._stored.read(plan.parts(values))
        tensors = merge_shards(plan.placement, [values])
        return dict(zip(plan.placement.source_names(), tensors, strict=True))


_Job = FileJob[list[ParameterPlan]]


def to_megatron(
    model: ModelConfig, trainer: TrainerConfig, output: Path, options: ConversionOptions, report: Report
) -> ConversionSummary:
    """See ``Converter.to_checkpoint``."""
    source, dimensions = model.path, ModelDimensions.from_checkpoint(model.path)
    plans = plan_ranks(model, trainer, dimensions)
    with open_checked(source, dimensions, compares_copies=True) as checkpoint:
        jobs = _jobs(_cast(plans, checkpoint, options), options.max_file_bytes)
        with hidden_output(output) as hidden:
            return _convert(trainer.parallel, _ToMegatron(source, hidden, options, checkpoint=checkpoint), jobs, report)


def _cast(plans: Sequence[RankPlan], checkpoint: HfCheckpoint, options: ConversionOptions) -> list[RankPlan]:
    """Set each parameter's type in the plans: the requested type, or the source tensors' type if they keep it.

    Raises:
        CheckpointError: tensors of different types become one tensor (Megatron stores all layers of a kind together).
    """
    wanted = None if options.dtype == "auto" else getattr(torch, options.dtype)
    together: dict[str, dict[str, list[str]]] = {}

    def cast(parameter: ParameterPlan) -> ParameterPlan:
        names = parameter.placement.source_names()
        if wanted is not None and not keeps_type(names[0]):
            return replace(parameter, dtype=wanted)
        for name in names if wanted is None else ():
            together.setdefault(parameter.key, {}).setdefault(checkpoint.dtype(name), []).append(name)
        return replace(parameter, dtype=DTYPES[checkpoint.dtype(names[0])])

    casts = [replace(plan, parameters=tuple(map(cast, plan.parameters))) for plan in plans]
    mixed = {name for types in together.values() if len(types) > 1 for name in min(types.values(), key=len)}
    if mixed:
        raise CheckpointError(
            f"tensors of one kind have different types: {list_names(sorted(mixed))} and others",
            code="mixed-dtypes",
            who=str(checkpoint.directory),
            remedy="give --dtype",
        )
    return casts


def _jobs(plans: Sequence[RankPlan], max_bytes: int) -> list[_Job]:
    jobs = []
    for plan in plans:
        files = in_files(plan.parameters, lambda parameter: parameter.nbytes, max_bytes)
        for number, parameters in enumerate(files):
            tensors = [parameter.placement.name for parameter in parameters]
            nbytes = sum(parameter.nbytes for parameter in parameters)
            jobs.append(FileJob(f"{WEIGHTS}/__{plan.rank}_{number}.distcp", parameters, tensors, nbytes))
    return jobs


@dataclass(frozen=True, slots=True, kw_only=True)
class _ToMegatron(Conversion[list[ParameterPlan]]):
    checkpoint: HfCheckpoint

    def _pieces(self, content: list[ParameterPlan], stream: ChecksumStream, tracker: Tracker) -> Iterator[ByteRange]:
        for parameter in content:
            for part in parameter.parts(self._values(parameter)):
                yield write_part(stream, part)
            tracker.advance(parameter.nbytes)

    def _values(self, parameter: ParameterPlan) -> Tensor:
        values, names = parameter.empty(), parameter.placement.source_names()
        for piece in parameter.placement.pieces():
            part = self.checkpoint.read_unchecked(names[piece.source], piece.axis, piece.start, piece.length)
            view = piece.view(values)
            view.copy_(part.view(view.shape))
            self.faults.note(names[piece.source], part, view)
        return values


def _convert(parallel: ParallelConfig, work: _ToMegatron, jobs: Sequence[_Job], report: Report) -> ConversionSummary:
    weights, model, parameters = (
        work.output / WEIGHTS,
        work.output / MODEL,
        [each for job in jobs for each in job.content],
    )
    weights.mkdir()
    files = work.write_files(jobs, report)
    boxes = {job.name: [Box.of(part) for parameter in job.content for part in parameter.parts()] for job in jobs}
    write_index(weights, [(Path(name).name, each, files[name]) for name, each in boxes.items()], plain_files({}))
    model.mkdir()
    dtype = common_dtype([(parameter.dtype, parameter.nbytes) for parameter in parameters])
    copy_companions(work.source, model, dtype)
    facts = {
        "source": str(work.source.resolve()),
        "dtype": str(dtype).removeprefix("torch."),
        "parallel": parallel.model_dump(),
        KEPT: len(work.checkpoint.kept),
    }
    write_description(work.output, facts)
    tensors = {name for parameter in parameters for name in parameter.placement.source_names()}
    return ConversionSummary(len(tensors), sum(job.nbytes for job in jobs), len(jobs))
