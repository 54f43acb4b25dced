"""DeepSeek-V3 and similar models: latent attention, shared experts, leading dense layers, biased routers."""

from backends.megatron.conversion.families.blocks import EXPERTS, MLP, NORMS, OUTER, gated_mlp, in_layers, layer_rule
from backends.megatron.conversion.rules import Family, hf
from backends.megatron.conversion.transforms import Replicated, Split
from slime_like.models.dimensions import ModelDimensions


def _compressing_queries(dimensions: ModelDimensions) -> range:
    return range(dimensions.num_layers if dimensions.latent and dimensions.latent.query_rank else 0)


def _projecting_queries(dimensions: ModelDimensions) -> range:
    return range(dimensions.num_layers - len(_compressing_queries(dimensions)))


_QUERY = (
    layer_rule("self_attention.linear_q_proj.weight", Split(axis=0), hf("self_attn.q_proj.weight", "query", "hidden")),
)

_COMPRESSED_QUERY = (
    layer_rule(
        "self_attention.linear_q_down_proj.weight",
        Split(axis=0),
        hf("self_attn.q_a_proj.weight", "query_rank", "hidden"),
    ),
    layer_rule("self_attention.q_layernorm.weight", Replicated(), hf("self_attn.q_a_layernorm.weight", "query_rank")),
    layer_rule(
        "self_attention.linear_q_up_proj.weight",
        Split(axis=0),
        hf("self_attn.q_b_proj.weight", "query", "query_rank"),
    ),
)

_KEY_VALUE = (
    layer_rule(
        "self_attention.linear_kv_down_proj.weight",
        Split(axis=0),
        hf("self_attn.kv_a_proj_with_mqa.weight", "compressed", "hidden"),
    ),
    layer_rule("self_attention.kv_layernorm.weight", Replicated(), hf("self_attn.kv_a_layernorm.weight", "kv_rank")),
    layer_rule(
        "self_attention.linear_kv_up_proj.weight",
        Split(axis=0),
        hf("self_attn.kv_b_proj.weight", "expanded", "kv_rank"),
    ),
    layer_rule("self_attention.linear_proj.weight", Split(axis=1), hf("self_attn.o_proj.weight", "hidden", "value")),
)

_SHARED_EXPERTS = (
    layer_rule("mlp.router.expert_bias", Replicated(), hf("mlp.gate.e_score_correction_bias", "experts")),
    *gated_mlp("mlp.shared_experts.", "mlp.shared_experts.", "shared_ffn"),
)

DEEPSEEK_V3 = Family(
    "deepseek_v3",
    (
        *OUTER,
        *NORMS,
        *in_layers(_QUERY, _projecting_queries),
        *in_layers(_COMPRESSED_QUERY, _compressing_queries),
        *_KEY_VALUE,
        *in_layers(MLP, lambda dimensions: range(dimensions.dense_layers)),
        *in_layers((*EXPERTS, *_SHARED_EXPERTS), lambda dimensions: dimensions.expert_layers),
    ),
)
