"""Low-rank factors in Megatron's linear layers (LoRA, https://arxiv.org/abs/2106.09685).

Every layer adds ``scale * B (A x)`` to its output. If the weight's rows are split between tensor-parallel ranks, so is
B, and A is replicated. If its columns are split, so is A, and B is replicated. Either way, ranks exchange only A x.

The gradient of a replicated factor is whole on every rank, unless ranks have different tokens (sequence parallelism) or
parts of an expert's sum. Megatron then adds up the ranks' gradients, as it does for norms.
"""

import contextlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    set_tensor_model_parallel_attributes,
)
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.tensor_parallel.random import get_expert_parallel_rng_tracker_name
from torch import Tensor, nn

from backends.common.step.grouped_product import grouped_linear
from backends.common.trainer.lora import block_diagonal, merge_lora
from backends.common.trainer.state import ADDED, is_added
from backends.megatron.conversion.placement import LORA_WEIGHTS, PlacedParameter, place_parameters
from backends.megatron.experts import GroupedLinear
from backends.megatron.families.rules import HfTensor, Rule
from backends.megatron.families.transforms import Rows, Sources, Stacked, Transform
from backends.megatron.head import LogprobModel
from slime_like.config import LoraConfig, ModelConfig
from slime_like.errors import ConfigError
from slime_like.models.dimensions import ModelDimensions
from slime_like.weights.adapter import factor_names, is_target


class LoraWeights(torch.nn.Module):
    """Factors of one weight.

    Attributes:
        a: (n r, in_local), for n targeted matrices.
        b: (out_local, r).
        owner: (out_local, n), see ``backends.common.trainer.lora``.
        rules: the conversion rules of ``a`` and ``b``.
    """

    a: Tensor
    b: Tensor
    owner: Tensor

    def __init__(
        self, settings: LoraConfig, placed: PlacedParameter, chosen: Sequence[int], sequence_parallel: bool
    ) -> None:
        """Create the factors of the matrices ``chosen`` among the weight's sources."""
        super().__init__()
        self.scale, self._dropout = settings.scale, settings.dropout
        self.rules = _rules(placed, chosen, settings.rank or 0)
        weight: Any = placed.parameter
        is_alone = placed.tp.size == 1
        for name, rule in zip("ab", self.rules, strict=True):
            sources = Sources(rule.shapes(placed.dimensions), placed.tp, placed.dimensions)
            values = weight.new_zeros(rule.transform.shard_shape(sources, tuple(weight.shape)))
            factor: Any = torch.nn.Parameter(values)
            is_split = rule.transform.sharded
            set_tensor_model_parallel_attributes(factor, is_split or is_alone, rule.transform.axis, 1)
            factor.allreduce = weight.allreduce
            factor.sequence_parallel = sequence_parallel and not (is_split or is_alone)
            self.register_parameter(name, factor)
        self.register_buffer("owner", _owner(placed, chosen), persistent=False)
        shares_inputs = placed.rule.transform.axis == 0 and not sequence_parallel
        in_expert = get_expert_parallel_rng_tracker_name()
        self._random = in_expert if placed.expert is not None else None if shares_inputs else "model-parallel-rng"

    def forward(self) -> tuple[Tensor, Tensor]:
        """Return (n r, in_local) and (out_local, n r) matrices."""
        return self.a, block_diagonal(self.b, self.owner)

    def merge(self, weight: Tensor) -> Tensor:
        """Return the weight's shard plus the product of the factors' shards."""
        return merge_lora(weight, self.a.detach(), self.b.detach(), self.owner, self.scale)

    def drop_out(self, x: Tensor) -> Tensor:
        """Apply dropout in training. Tensor-parallel ranks with the same inputs drop the same ones."""
        if not (self.training and self._dropout):
            return x
        with contextlib.nullcontext() if self._random is None else get_cuda_rng_tracker().fork(self._random):
            return F.dropout(x, self._dropout)


def _rules(placed: PlacedParameter, chosen: Sequence[int], rank: int) -> tuple[Rule, Rule]:
    rule = placed.rule
    sources = [(*factor_names(rule.sources[index].name), rule.sources[index].sizes) for index in chosen]
    a_sources = tuple(HfTensor(name, (rank, sizes[1])) for name, _, sizes in sources)
    b_sources = tuple(HfTensor(name, (sizes[0], rank)) for _, name, sizes in sources)
    layouts: tuple[Transform, Transform] = rule.transform, Stacked()  # split columns
    if rule.transform.axis == 0:
        layouts = Stacked(), Rows(rule.transform, [(shape[0], rank) for shape in placed.shapes], chosen)
    stem = rule.megatron.removesuffix("weight") + ADDED
    return Rule(f"{stem}.a", layouts[0], a_sources), Rule(f"{stem}.b", layouts[1], b_sources)


def _owner(placed: PlacedParameter, chosen: Sequence[int]) -> Tensor:
    weight = placed.parameter
    if placed.rule.transform.axis == 1:
        return weight.new_ones(len(weight), 1)
    owner = weight.new_zeros(len(weight), len(chosen))
    for piece in placed.pieces():
        if piece.source in chosen:
            piece.view(owner)[..., chosen.index(piece.source)] = 1
    return owner


# ----------------------------------------------------------------------------------------------------------- the layers
def _add(layer: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, Any]) -> tuple[Tensor, Any]:
    """Add the product of a column-parallel or row-parallel layer's factors to its output."""
    factors, group = layer.added, layer.tp_group
    a, b = factors()
    h = F.linear(factors.drop_out(inputs[0]), a) * factors.scale
    if group.size() > 1 and not layer.explicit_expert_comm:
        by_column = isinstance(layer, ColumnParallelLinear)
        if layer.sequence_parallel:
            exchanged = (
                gather_from_sequence_parallel_region if by_column else reduce_scatter_to_sequence_parallel_region
            )
        else:
            exchanged = copy_to_tensor_model_parallel_region if by_column else reduce_from_tensor_model_parallel_region
        h = exchanged(h, group=group)
    return output[0] + F.linear(h, b), output[1]


def _add_grouped(layer: Any, inputs: tuple[Tensor, Tensor], output: tuple[Tensor, None]) -> tuple[Tensor, None]:
    """Add the products of all experts' factors to a grouped layer's output."""
    (x, ends), first = inputs, layer.added[0]
    a, b = zip(*(factors() for factors in layer.added), strict=True)
    h = grouped_linear(first.drop_out(x), ends, a) * first.scale
    return output[0] + grouped_linear(h, ends, b), None


# ------------------------------------------------------------------------------------------------------------ the model
def add_lora(settings: ModelConfig, model: LogprobModel) -> None:
    """Add factors to every layer of a model chunk that holds targeted matrices, and freeze everything else.

    Raises:
        ConfigError: the chunk has no target, or a target is not in a linear layer.
    """
    dimensions = ModelDimensions.from_checkpoint(settings.path)
    modules = list(model.modules())
    layers: dict[Tensor, Any] = {weight: layer for layer in modules for weight in layer.parameters(recurse=False)}
    for placed in place_parameters([model], dimensions):
        named = enumerate(zip(placed.source_names(), placed.shapes, strict=True))
        if chosen := [index for index, (name, shape) in named if is_target(settings.lora, name, shape)]:
            factors = LoraWeights(settings.lora, placed, chosen, model.config.sequence_parallel)
            _attach(layers[placed.parameter], factors, placed)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(is_added(name))
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ConfigError(
            f"model.lora.targets={list(settings.lora.targets)}: a pipeline stage has no factors, so nothing in it "
            "could be trained; target modules of every stage, or use fewer stages",
            code="stage-without-factors",
        )
    if model.pre_process and model.config.recompute_granularity == "full":
        model.embedding.register_forward_hook(_require_gradient)


def _attach(layer: Any, factors: LoraWeights, placed: PlacedParameter) -> None:
    is_grouped = isinstance(layer, GroupedLinear)
    if not (is_grouped or isinstance(layer, ColumnParallelLinear | RowParallelLinear)):
        raise ConfigError(
            f"model.lora.targets: {placed.name} is in a layer of type {type(layer).__name__}, which cannot have "
            "factors; name other modules",
            code="layer-cannot-have-factors",
        )
    setattr(placed.parameter, LORA_WEIGHTS, factors)
    if is_grouped and hasattr(layer, ADDED):
        layer.added.append(factors)
        return
    layer.added = torch.nn.ModuleList([factors]) if is_grouped else factors
    layer.register_forward_hook(_add_grouped if is_grouped else _add)


def _require_gradient(module: Any, inputs: Any, output: Tensor) -> Tensor:
    """Recomputed layers get gradients only if their input requires one, and a frozen embedding's output does not."""
    return output.requires_grad_() if torch.is_grad_enabled() else output


# ---------------------------------------------------------------------------------------------------------- checkpoints
_FACTOR = re.compile(rf"(?P<layer>.+)\.{ADDED}\.?(?P<expert>\d*)\.(?P<letter>[ab])")
"""Name of a factor. ``GroupedLinear`` numbers its experts' factors."""


def lora_entries(chunk: nn.Module, state: Mapping[str, Any]) -> dict[str, ShardedTensor | ShardedTensorFactory]:
    """Describe the factors in a model chunk by name.

    Factors are cut like their weights, so any layout reads them. Every layer and expert has its own tensors on disk,
    because targets may differ.

    Args:
        state: sharded state of the whole chunk, which describes the weights.
    """
    entries: dict[str, ShardedTensor | ShardedTensorFactory] = {}
    for name, factor in chunk.named_parameters():
        if match := _FACTOR.fullmatch(name):
            weight = state[f"{match['layer']}.weight{match['expert']}"]
            parts = list(nested_values(weight.build())) if isinstance(weight, ShardedTensorFactory) else [weight]
            entries[name] = _like(parts[0], factor, "a") if match["letter"] == "a" else _whole_b(parts, factor)
    return entries


def _whole_b(parts: list[ShardedTensor], b: Tensor) -> ShardedTensor | ShardedTensorFactory:
    """Describe a B whose weight may be several parts of the tensor on disk, such as gate and up projection."""
    first = _like(parts[0], b.chunk(len(parts))[0], "b")
    if len(parts) == 1:
        return replace(first, data=b)

    def build(key: str, values: Tensor, *unused: Any) -> list[ShardedTensor]:
        rows = zip(parts, values.chunk(len(parts)), strict=True)
        return [replace(_like(part, one, "b"), key=key) for part, one in rows]

    return ShardedTensorFactory(first.key, b, build, torch.cat, first.replica_id)


def _like(base: ShardedTensor, factor: Tensor, letter: str) -> ShardedTensor:
    """Describe an A that is cut by columns like its weight and has whole rows, or a B the other way round."""
    leading, whole = base.prepend_axis_num, "ab".index(letter)
    numbers = "".join(f".{number}" for number in base.global_offset[:leading])
    described = base.global_shape, base.global_offset, base.axis_fragmentations
    shape, offset, cuts = (list(each[leading:]) for each in described)
    # Ranks with other parts of the weight along the whole axis hold copies of the factor.
    copy = base.replica_id[1] + offset[whole] // base.local_shape[whole]
    shape[whole], offset[whole], cuts[whole] = factor.shape[whole], 0, 1
    return ShardedTensor(
        f"{base.key.removesuffix('weight')}{ADDED}.{letter}{numbers}",
        factor,
        factor.dtype,
        tuple(factor.shape),
        *(tuple(each) for each in (shape, offset, cuts)),
        (base.replica_id[0], copy, base.replica_id[2]),
    )
