"""Rules of conversion: the Hugging Face tensors of each Megatron parameter."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from backends.megatron.families.transforms import Shape, Transform
from slime_like.models.dimensions import ModelDimensions

OUTPUT_LAYER = "output_layer.weight"


class HfTensor(NamedTuple):
    """A Hugging Face tensor: its name, with placeholders ``{layer}`` and ``{expert}``, and its shape.

    Attributes:
        sizes: numbers, or names of sizes.
    """

    name: str
    sizes: tuple[str | int, ...]

    def shape(self, dimensions: ModelDimensions) -> Shape:
        known = _named_sizes(dimensions)
        return tuple(known[size] if isinstance(size, str) else size for size in self.sizes)


def hf(name: str, *sizes: str) -> HfTensor:
    """Create an ``HfTensor`` with names of ``_named_sizes``; short for rule tables."""
    return HfTensor(name, sizes)


def _named_sizes(dimensions: ModelDimensions) -> dict[str, int]:
    return dimensions.attention.sizes(dimensions) | {
        "hidden": dimensions.hidden_size,
        "query": dimensions.num_heads * dimensions.head_dim,
        "gated_query": 2 * dimensions.num_heads * dimensions.head_dim,
        "key_value": dimensions.num_kv_heads * dimensions.head_dim,
        "head": dimensions.head_dim,
        "heads": dimensions.num_heads,
        "ffn": dimensions.ffn_hidden_size,
        "expert_ffn": dimensions.moe_ffn_hidden_size,
        "expert_gate_up": 2 * dimensions.moe_ffn_hidden_size,
        "shared_ffn": dimensions.moe_shared_ffn_hidden_size,
        "experts": dimensions.num_experts,
        "vocabulary": dimensions.vocab_size,
    }


@dataclass(frozen=True)
class Rule:
    """One Megatron parameter (per layer, per expert) and its Hugging Face tensors.

    Attributes:
        megatron: Megatron's canonical name with global layer and expert numbers.
        sources: in the order in which the transform counts them.
        exported: False for the second copy of a tied embedding.
        stacked: the parameter holds all experts of a rank, which the expert-parallel ranks split along the first axis.
        layers: the layers that have the parameter; ``None`` means all.
    """

    megatron: str
    transform: Transform
    sources: tuple[HfTensor, ...]
    exported: bool = True
    stacked: bool = False
    layers: Sequence[int] | None = None

    @property
    def per_expert(self) -> bool:
        return "{expert}" in self.megatron

    @cached_property
    def pattern(self) -> re.Pattern[str]:
        """Pattern of Megatron names, with groups ``layer`` and ``expert`` if the rule has them."""
        escaped = re.escape(self.megatron)
        for number in ("layer", "expert"):
            escaped = escaped.replace(rf"\{{{number}\}}", rf"(?P<{number}>\d+)")
        return re.compile(escaped)

    def shapes(self, dimensions: ModelDimensions) -> tuple[Shape, ...]:
        return tuple(source.shape(dimensions) for source in self.sources)

    def instances(self, dimensions: ModelDimensions) -> Iterator[tuple[int | None, int | None]]:
        """Return every (layer, expert) that the rule covers; ``None`` for a number it does not have."""
        every = range(dimensions.num_layers) if self.layers is None else self.layers
        layers = every if "{layer}" in self.megatron else (None,)
        experts = range(dimensions.num_experts) if self.per_expert else (None,)
        return ((layer, expert) for layer in layers for expert in experts)


EMBEDDING = hf("model.embed_tokens.weight", "vocabulary", "hidden")
