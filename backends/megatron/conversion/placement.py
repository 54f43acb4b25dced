"""Matching of this rank's parameters to rules, under global layer and expert numbers, and loading of their values."""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_model import GPTModel
from torch import Tensor

from backends.common.hugging_face.files import HfCheckpoint, ValueModel
from backends.common.process.agreement import list_names, together
from backends.common.trainer.state import ADDED, is_added
from backends.megatron.families import family_of
from backends.megatron.families.rules import Rule
from backends.megatron.families.transforms import Piece, Shape, Sources, TensorRank
from slime_like.errors import CheckpointError
from slime_like.models.dimensions import EMBEDDING, HEADS, ModelDimensions

LORA_WEIGHTS = "lora_weights"
"""Attribute of a parameter that has low-rank factors."""

EXPERT_BIAS = "expert_bias"
"""The only weight that is not a parameter, of a sigmoid router: always float32, without a gradient."""

_FUSED_NAMES = (
    (r"(decoder\.layers\.\d+\.)self_attention\.linear_qkv\.layer_norm_weight", r"\1input_layernorm.weight"),
    (r"(decoder\.layers\.\d+\.)mlp\.linear_fc1\.layer_norm_weight", r"\1pre_mlp_layernorm.weight"),
    (r"(.+\.experts\.)(linear_fc[12])\.weight(\d+)", r"\1local_experts.\3.\2.weight"),
    (r"(.+\.experts\.)(linear_fc[12])\.added\.(\d+)\.([ab])", r"\1local_experts.\3.\2.added.\4"),
)
"""Names in which Transformer Engine fuses modules or groups experts, and the canonical names."""


@dataclass(frozen=True, slots=True)
class PlacedParameter:
    """One parameter of this rank, or a buffer that is a weight.

    Attributes:
        name: Megatron's name with global layer and expert numbers.
        layer, expert: these numbers; ``None`` if the rule has none.
        tp: this rank's position in the group that shards the parameter.
    """

    name: str
    parameter: Tensor
    rule: Rule
    layer: int | None
    expert: int | None
    tp: TensorRank
    dimensions: ModelDimensions

    @property
    def lora_weights(self) -> Any:
        """Low-rank factors of the parameter, or ``None``."""
        return getattr(self.parameter, LORA_WEIGHTS, None)

    @property
    def value(self) -> Tensor:
        """The parameter, plus the product of its factors if it has some."""
        return self.parameter.data if self.lora_weights is None else self.lora_weights.merge(self.parameter.data)

    @property
    def shapes(self) -> tuple[Shape, ...]:
        """Full shapes of the Hugging Face tensors."""
        return self.rule.shapes(self.dimensions)

    def source_names(self, expert: int | None = None) -> list[str]:
        """Return the Hugging Face names, for another ``expert`` if given."""
        number = self.expert if expert is None else expert
        return [source.name.format(layer=self.layer, expert=number) for source in self.rule.sources]

    def pieces(self, rank: int | None = None) -> tuple[Piece, ...]:
        """Return the pieces of this rank's shard, or of another ``rank``'s in the same group."""
        tp = self.tp if rank is None else TensorRank(rank, self.tp.size)
        return self.rule.transform.pieces(Sources(self.shapes, tp, self.dimensions), tuple(self.parameter.shape))

    def check(self) -> None:
        """Require exactly one source for every element of the parameter."""
        actual = tuple(self.parameter.shape)
        wanted = self.rule.transform.shard_shape(Sources(self.shapes, self.tp, self.dimensions), actual)
        covered = sum(piece.numel(self.shapes) for piece in self.pieces()) if actual == wanted else -1
        if covered != self.parameter.numel() and not (self.rule.transform.pads and covered >= 0):
            raise CheckpointError(
                f"parameter {self.name} has shape {list(actual)}, but rank {self.tp.rank} of {self.tp.size} needs "
                f"{list(wanted)} to hold {list_names(self.source_names())}",
                code="model-differs-from-config",
                remedy="the model and its config.json differ",
            )


def place_parameters(model_chunks: Sequence[GPTModel], dimensions: ModelDimensions) -> list[PlacedParameter]:
    """Match every parameter of this rank to its rule.

    Raises:
        CheckpointError: no rule covers a parameter, or its shape is wrong.
    """
    rules = family_of(dimensions).rules_for(dimensions)
    placements: list[PlacedParameter] = []
    unknown: list[str] = []
    for name, parameter in _global_parameters(model_chunks, dimensions):
        placement = _place(name, parameter, rules, dimensions)
        if placement is None:
            unknown.append(name)
        else:
            placement.check()
            placements.append(placement)
    if unknown:
        raise CheckpointError(
            f"parameters that no rule of family {dimensions.family} covers: {list_names(unknown)}",
            code="no-conversion-rule",
            remedy="add rules in backends/megatron/families",
        )
    return placements


def place_lora_weights(model_chunks: Sequence[GPTModel], dimensions: ModelDimensions) -> list[PlacedParameter]:
    """Match every low-rank factor of this rank to its rule: A and B of each weight that has some."""
    return [
        replace(placed, name=f"{placed.name.removesuffix('weight')}{ADDED}.{letter}", parameter=factor, rule=rule)
        for placed in place_parameters(model_chunks, dimensions)
        if placed.lora_weights is not None
        for (letter, factor), rule in zip(
            placed.lora_weights.named_parameters(), placed.lora_weights.rules, strict=True
        )
    ]


def _place(name: str, parameter: Tensor, rules: Sequence[Rule], dimensions: ModelDimensions) -> PlacedParameter | None:
    for rule in rules:
        if match := rule.pattern.fullmatch(name):
            numbers = {key: int(value) for key, value in match.groupdict().items()}
            if rule.stacked:
                group = parallel_state.get_expert_model_parallel_group()
            elif rule.per_expert:
                group = parallel_state.get_expert_tensor_parallel_group()
            else:
                group = parallel_state.get_tensor_model_parallel_group()
            tp = TensorRank(group.rank(), group.size())
            return PlacedParameter(name, parameter, rule, numbers.get("layer"), numbers.get("expert"), tp, dimensions)
    return None


def _global_parameters(model_chunks: Sequence[GPTModel], dimensions: ModelDimensions) -> Iterator[tuple[str, Tensor]]:
    """Yield parameters under canonical names, with the model's numbers of layers and experts instead of the chunk's."""
    first = local_experts(dimensions) * parallel_state.get_expert_model_parallel_rank()
    for chunk, (name, parameter) in ((part, each) for part in model_chunks for each in named_weights(part)):
        if is_added(name):
            continue
        for pattern, replacement in _FUSED_NAMES:
            name = re.sub(rf"^{pattern}$", replacement, name)
        if match := re.match(r"decoder\.layers\.(\d+)\.", name):
            layer = chunk.decoder.layers[int(match[1])].layer_number - 1
            name = f"decoder.layers.{layer}.{name[match.end() :]}"
        if match := re.search(r"\.local_experts\.(\d+)\.", name):
            name = f"{name[: match.start()]}.local_experts.{first + int(match[1])}.{name[match.end() :]}"
        yield name, parameter


def named_weights(chunk: GPTModel) -> Iterator[tuple[str, Tensor]]:
    """Yield everything a checkpoint holds of a chunk: parameters, and buffers that are weights."""
    yield from chunk.named_parameters()
    yield from ((name, buffer) for name, buffer in chunk.named_buffers() if name.endswith(f".{EXPERT_BIAS}"))


def set_dropout(chunks: Iterable[GPTModel], is_active: bool) -> None:
    """Let all low-rank factors drop inputs from now on, or none."""
    for parameter in (parameter for chunk in chunks for parameter in chunk.parameters()):
        if (factors := getattr(parameter, LORA_WEIGHTS, None)) is not None:
            factors.train(is_active)


def local_experts(dimensions: ModelDimensions) -> int:
    """Return the number of experts per expert-parallel rank. They are consecutive."""
    return dimensions.num_experts // parallel_state.get_expert_model_parallel_world_size()


def load_hf_weights(
    model_chunks: Sequence[GPTModel], hf_dir: Path, dimensions: ModelDimensions, adapter: Path | None = None
) -> None:
    """Fill every parameter of ``model_chunks`` from ``hf_dir``, cast to the parameter's type.

    Collective over the world. A rank reads only its slices, one at a time. Every parameter element is written once
    (vocabulary padding with zero), and every tensor of the checkpoint is used by some rank.

    Raises:
        CheckpointError: missing or unexpected tensors, wrong shapes, damaged files, NaN, or parameters without a
            source; on every rank, even if only one found it.
    """
    device = next(model_chunks[0].parameters()).device
    what = f"loading {hf_dir}"
    placements = together(lambda: place_parameters(model_chunks, dimensions), what, device)
    _require_all_used(placements, dimensions, device)
    first = dist.get_rank() == 0  # only this rank reads more than its part
    with together(lambda: open_checked(hf_dir, dimensions, first, adapter), what, device) as checkpoint:
        together(lambda: fill(placements, checkpoint), what, device)


def open_checked(
    hf_dir: Path, dimensions: ModelDimensions, compares_copies: bool, adapter: Path | None = None
) -> HfCheckpoint:
    """Open a checkpoint that must have exactly the model's tensors. Comparing copies reads whole tensors. An adapter is
    merged into a value model."""
    checkpoint = ValueModel(hf_dir, adapter) if dimensions.values else HfCheckpoint(hf_dir)
    ignored = {name for name in checkpoint.shapes() if dimensions.is_ignored(name)}
    checkpoint.require(family_of(dimensions).hf_shapes(dimensions), ignored)
    if compares_copies:
        checkpoint.require_copies(ignored.intersection(HEADS), EMBEDDING)
    return checkpoint


def _require_all_used(placements: Sequence[PlacedParameter], dimensions: ModelDimensions, device: torch.device) -> None:
    """Require a place on some rank for every Hugging Face tensor of the model. Collective."""
    names = sorted(family_of(dimensions).hf_shapes(dimensions))
    sources = {name for placement in placements for name in placement.source_names()}
    used = torch.tensor([name in sources for name in names], dtype=torch.uint8, device=device)
    dist.all_reduce(used, op=dist.ReduceOp.MAX)
    unused = [name for name, mark in zip(names, used.tolist(), strict=True) if not mark]
    if unused:
        raise CheckpointError(
            f"no parameter of any rank takes {list_names(unused)}",
            code="model-differs-from-config",
            remedy="the model was built without the modules they belong to",
        )


class Source(Protocol):
    """Tensors by Hugging Face name."""

    def read(self, name: str, axis: int, start: int, length: int) -> Tensor:
        """Return ``length`` entries from ``start`` along ``axis``."""


@torch.no_grad()
def fill(placements: Sequence[PlacedParameter], source: Source) -> None:
    """Fill parameters, one slice at a time."""
    for placement in placements:
        target, names = placement.parameter.data, placement.source_names()
        if placement.rule.transform.pads:
            target.zero_()
        for piece in placement.pieces():
            values = source.read(names[piece.source], piece.axis, piece.start, piece.length)
            view = piece.view(target)
            view.copy_(values.view(view.shape))
