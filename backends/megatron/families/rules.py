"""Rules of conversion: the Hugging Face tensors of each Megatron parameter, and tables that several families share."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from backends.megatron.families.transforms import GateUp, GroupedQkv, Replicated, Shape, Split, Transform, Vocabulary
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


LAYER = "decoder.layers.{layer}."
HF_LAYER = "model.layers.{layer}."


def layer_rule(megatron: str, transform: Transform, *sources: HfTensor) -> Rule:
    """Return a rule inside a transformer layer. Names on both sides omit the layer's prefix."""
    return Rule(LAYER + megatron, transform, tuple(HfTensor(HF_LAYER + name, sizes) for name, sizes in sources))


def in_layers(rules: Sequence[Rule], layers: Sequence[int]) -> tuple[Rule, ...]:
    """Return the same rules, for some layers only."""
    return tuple(replace(rule, layers=layers) for rule in rules)


OUTER = (
    Rule("embedding.word_embeddings.weight", Vocabulary(), (EMBEDDING,)),
    Rule("decoder.final_layernorm.weight", Replicated(), (hf("model.norm.weight", "hidden"),)),
    Rule(OUTPUT_LAYER, Vocabulary(), (hf("lm_head.weight", "vocabulary", "hidden"),)),
)

NORMS = (
    layer_rule("input_layernorm.weight", Replicated(), hf("input_layernorm.weight", "hidden")),
    layer_rule("pre_mlp_layernorm.weight", Replicated(), hf("post_attention_layernorm.weight", "hidden")),
)


def qkv(kind: str, *width: str, query: str = "query") -> Rule:
    """Return the rule of the fused projection's weight or bias; ``query`` names the size of all queries."""
    rows = {"q": query, "k": "key_value", "v": "key_value"}
    sources = (hf(f"self_attn.{letter}_proj.{kind}", size, *width) for letter, size in rows.items())
    return layer_rule(f"self_attention.linear_qkv.{kind}", GroupedQkv(), *sources)


def gated_mlp(megatron: str, hugging_face: str, width: str) -> tuple[Rule, Rule]:
    """Return rules for gate, up and down projections of one MLP or expert. Names end in a dot."""
    gate, up = (hf(f"{hugging_face}{part}_proj.weight", width, "hidden") for part in ("gate", "up"))
    down = hf(f"{hugging_face}down_proj.weight", "hidden", width)
    return (
        layer_rule(f"{megatron}linear_fc1.weight", GateUp(), gate, up),
        layer_rule(f"{megatron}linear_fc2.weight", Split(axis=1), down),
    )


PROJECTION = layer_rule(
    "self_attention.linear_proj.weight", Split(axis=1), hf("self_attn.o_proj.weight", "hidden", "query")
)
ATTENTION = (qkv("weight", "hidden"), PROJECTION)
QKV_BIAS = (qkv("bias"),)
QK_NORM = (
    layer_rule("self_attention.q_layernorm.weight", Replicated(), hf("self_attn.q_norm.weight", "head")),
    layer_rule("self_attention.k_layernorm.weight", Replicated(), hf("self_attn.k_norm.weight", "head")),
)

OUTPUT_BIAS = (layer_rule("self_attention.linear_proj.bias", Replicated(), hf("self_attn.o_proj.bias", "hidden")),)
SINKS = (layer_rule("self_attention.core_attention.sinks", Split(axis=0), hf("self_attn.sinks", "heads")),)

_MLP = gated_mlp("mlp.", "mlp.", "ffn")
_EXPERTS = (
    layer_rule("mlp.router.weight", Replicated(), hf("mlp.gate.weight", "experts", "hidden")),
    *gated_mlp("mlp.experts.local_experts.{expert}.", "mlp.experts.{expert}.", "expert_ffn"),
)
_ROUTER_BIAS = (layer_rule("mlp.router.expert_bias", Replicated(), hf("mlp.gate.e_score_correction_bias", "experts")),)
_SHARED_EXPERTS = gated_mlp("mlp.shared_experts.", "mlp.shared_experts.", "shared_ffn")
_GATED_SHARED_EXPERT = (
    *gated_mlp("mlp.shared_experts.", "mlp.shared_expert.", "shared_ffn"),
    layer_rule(
        "mlp.shared_experts.gate_weight", Replicated(), HfTensor("mlp.shared_expert_gate.weight", (1, "hidden"))
    ),
)


def _stack(megatron: str, name: str, *sizes: str) -> Rule:
    rule = layer_rule(f"mlp.experts.{megatron}", Split(axis=0), hf(f"mlp.experts.{name}", "experts", *sizes))
    return replace(rule, stacked=True)


_STACKED_EXPERTS = (
    layer_rule("mlp.router.weight", Replicated(), hf("mlp.router.weight", "experts", "hidden")),
    layer_rule("mlp.router.bias", Replicated(), hf("mlp.router.bias", "experts")),
    _stack("linear_fc1.weight", "gate_up_proj", "hidden", "expert_gate_up"),
    _stack("linear_fc1.bias", "gate_up_proj_bias", "expert_gate_up"),
    _stack("linear_fc2.weight", "down_proj", "expert_ffn", "hidden"),
    _stack("linear_fc2.bias", "down_proj_bias", "hidden"),
)


def feed_forward(dimensions: ModelDimensions) -> tuple[Rule, ...]:
    """Return the rules of dense layers, and of layers with experts. Those with biases are stacks."""
    if dimensions.moe_bias:
        return _STACKED_EXPERTS
    biases = _ROUTER_BIAS if dimensions.moe_sigmoid else ()
    shared: tuple[Rule, ...] = _SHARED_EXPERTS if dimensions.moe_shared_ffn_hidden_size else ()
    if dimensions.moe_shared_gate:
        shared = _GATED_SHARED_EXPERT
    dense = range(dimensions.num_layers - len(dimensions.expert_layers))
    return (*in_layers(_MLP, dense), *in_layers((*_EXPERTS, *biases, *shared), dimensions.expert_layers))
