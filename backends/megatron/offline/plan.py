"""Stored tensors of every rank of a layout, computed in one process without memory or messages."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory, is_main_replica
from torch import Tensor

from backends.common.checkpoint.writing import Part
from backends.common.process.agreement import list_names
from backends.megatron.checkpoint import Sharded, parts_of
from backends.megatron.conversion.placement import PlacedParameter, named_weights, place_lora_weights, place_parameters
from backends.megatron.families import family_of
from backends.megatron.families.transforms import Shape
from backends.megatron.lora import lora_entries
from backends.megatron.model import build_meta_chunks
from backends.megatron.parallel import alone_as
from slime_like.config import ModelConfig, TrainerConfig
from slime_like.errors import CheckpointError
from slime_like.models.dimensions import ModelDimensions
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
