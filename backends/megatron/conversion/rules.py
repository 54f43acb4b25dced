"""Rules of one model family: the Hugging Face tensors of each Megatron parameter."""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from backends.megatron.conversion.transforms import Shape, Transform, Vocabulary
from slime_like.models.config_json import LatentAttention
from slime_like.models.dimensions import ModelDimensions

OUTPUT_LAYER = "output_layer.weight"


class HfTensor(NamedTuple):
    """A Hugging Face tensor: its name, with placeholders ``{layer}`` and ``{expert}``, and its shape in named sizes."""

    name: str
    sizes: tuple[str, ...]

    def shape(self, dimensions: ModelDimensions) -> Shape:
        known = _named_sizes(dimensions)
        return tuple(known[size] for size in self.sizes)


def hf(name: str, *sizes: str) -> HfTensor:
    """Create an ``HfTensor`` with names of ``_named_sizes``; short for rule tables."""
    return HfTensor(name, sizes)


def _named_sizes(dimensions: ModelDimensions) -> dict[str, int]:
    latent = {} if dimensions.latent is None else _latent_sizes(dimensions, dimensions.latent)
    return latent | {
        "hidden": dimensions.hidden_size,
        "query": dimensions.num_heads * dimensions.head_dim,
        "key_value": dimensions.num_kv_heads * dimensions.head_dim,
        "head": dimensions.head_dim,
        "ffn": dimensions.ffn_hidden_size,
        "expert_ffn": dimensions.moe_ffn_hidden_size,
        "shared_ffn": dimensions.moe_shared_ffn_hidden_size,
        "experts": dimensions.num_experts,
        "vocabulary": dimensions.vocab_size,
    }


def _latent_sizes(dimensions: ModelDimensions, latent: LatentAttention) -> dict[str, int]:
    return {
        "query_rank": latent.query_rank or 0,
        "kv_rank": latent.kv_rank,
        "compressed": latent.kv_rank + latent.rope_dim,
        "expanded": dimensions.num_heads * (latent.nope_dim + latent.value_dim),
        "value": dimensions.num_heads * latent.value_dim,
    }


def every_layer(dimensions: ModelDimensions) -> range:
    """Return all layers, a rule's default."""
    return range(dimensions.num_layers)


@dataclass(frozen=True)
class Rule:
    """One Megatron parameter (per layer, per expert) and its Hugging Face tensors.

    Attributes:
        megatron: Megatron's canonical name with global layer and expert numbers.
        sources: in the order in which the transform counts them.
        exported: False for the second copy of a tied embedding.
    """

    megatron: str
    transform: Transform
    sources: tuple[HfTensor, ...]
    exported: bool = True
    layers: Callable[[ModelDimensions], range] = every_layer

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
        layers = self.layers(dimensions) if "{layer}" in self.megatron else (None,)
        experts = range(dimensions.num_experts) if self.per_expert else (None,)
        return ((layer, expert) for layer in layers for expert in experts)


@dataclass(frozen=True, slots=True)
class Family:
    """All rules of one family."""

    name: str
    rules: tuple[Rule, ...]

    def rules_for(self, dimensions: ModelDimensions) -> tuple[Rule, ...]:
        """Return the rules of one model. A tied head is read from the embedding and never exported."""
        rules = (rule for rule in self.rules if any(True for _ in rule.instances(dimensions)))
        if not dimensions.tied_embeddings:
            return tuple(rules)
        return tuple(TIED_OUTPUT if rule.megatron == OUTPUT_LAYER else rule for rule in rules)

    def hf_shapes(self, dimensions: ModelDimensions) -> dict[str, Shape]:
        """Return the name and shape of every Hugging Face tensor of the model."""
        return {
            source.name.format(layer=layer, expert=expert): shape
            for rule in self.rules_for(dimensions)
            for source, shape in zip(rule.sources, rule.shapes(dimensions), strict=True)
            for layer, expert in rule.instances(dimensions)
        }


EMBEDDING = hf("model.embed_tokens.weight", "vocabulary", "hidden")
TIED_OUTPUT = Rule(OUTPUT_LAYER, Vocabulary(), (EMBEDDING,), exported=False)
