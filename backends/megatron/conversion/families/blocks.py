"""Rule tables that several families share."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from backends.megatron.conversion.rules import EMBEDDING, OUTPUT_LAYER, HfTensor, Rule, hf
from backends.megatron.conversion.transforms import GateUp, GroupedQkv, Replicated, Split, Transform, Vocabulary
from slime_like.models.dimensions import ModelDimensions

LAYER = "decoder.layers.{layer}."
HF_LAYER = "model.layers.{layer}."


def layer_rule(megatron: str, transform: Transform, *sources: HfTensor) -> Rule:
    """A rule inside a transformer layer; both sides' names are given without the layer's prefix."""
    return Rule(LAYER + megatron, transform, tuple(HfTensor(HF_LAYER + name, sizes) for name, sizes in sources))


def in_layers(rules: Sequence[Rule], layers: Callable[[ModelDimensions], range]) -> tuple[Rule, ...]:
    """The same rules, for some layers only."""
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

ATTENTION = (
    layer_rule(
        "self_attention.linear_qkv.weight",
        GroupedQkv(),
        hf("self_attn.q_proj.weight", "query", "hidden"),
        hf("self_attn.k_proj.weight", "key_value", "hidden"),
        hf("self_attn.v_proj.weight", "key_value", "hidden"),
    ),
    layer_rule("self_attention.linear_proj.weight", Split(axis=1), hf("self_attn.o_proj.weight", "hidden", "query")),
)

QKV_BIAS = (
    layer_rule(
        "self_attention.linear_qkv.bias",
        GroupedQkv(),
        hf("self_attn.q_proj.bias", "query"),
        hf("self_attn.k_proj.bias", "key_value"),
        hf("self_attn.v_proj.bias", "key_value"),
    ),
)

QK_NORM = (
    layer_rule("self_attention.q_layernorm.weight", Replicated(), hf("self_attn.q_norm.weight", "head")),
    layer_rule("self_attention.k_layernorm.weight", Replicated(), hf("self_attn.k_norm.weight", "head")),
)

MLP = (
    layer_rule(
        "mlp.linear_fc1.weight",
        GateUp(),
        hf("mlp.gate_proj.weight", "ffn", "hidden"),
        hf("mlp.up_proj.weight", "ffn", "hidden"),
    ),
    layer_rule("mlp.linear_fc2.weight", Split(axis=1), hf("mlp.down_proj.weight", "hidden", "ffn")),
)

EXPERTS = (
    layer_rule("mlp.router.weight", Replicated(), hf("mlp.gate.weight", "experts", "hidden")),
    layer_rule(
        "mlp.experts.local_experts.{expert}.linear_fc1.weight",
        GateUp(),
        hf("mlp.experts.{expert}.gate_proj.weight", "expert_ffn", "hidden"),
        hf("mlp.experts.{expert}.up_proj.weight", "expert_ffn", "hidden"),
    ),
    layer_rule(
        "mlp.experts.local_experts.{expert}.linear_fc2.weight",
        Split(axis=1),
        hf("mlp.experts.{expert}.down_proj.weight", "hidden", "expert_ffn"),
    ),
)
