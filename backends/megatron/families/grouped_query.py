"""Llama and similar models: grouped-query attention, with or without biases, norms of heads, and experts."""

from typing import Any

from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig

from backends.megatron.attention import PackedCoreAttention
from backends.megatron.families.blocks import ATTENTION, NORMS, OUTER, QK_NORM, QKV_BIAS, feed_forward
from backends.megatron.families.family import MegatronFamily
from backends.megatron.families.rules import Rule
from backends.megatron.norm import RMSNorm
from slime_like.models.dimensions import ModelDimensions


def _settings(dimensions: ModelDimensions) -> dict[str, Any]:
    return {"qk_layernorm": dimensions.qk_norm, "add_qkv_bias": dimensions.qkv_bias}


def _attention(config: TransformerConfig, layer: int, attention: ModuleSpec) -> ModuleSpec:
    attention.submodules.core_attention = PackedCoreAttention
    if config.qk_layernorm:
        attention.submodules.q_layernorm = attention.submodules.k_layernorm = RMSNorm
    return attention


def _rules(dimensions: ModelDimensions) -> tuple[Rule, ...]:
    biases = QKV_BIAS if dimensions.qkv_bias else ()
    norms = QK_NORM if dimensions.qk_norm else ()
    return (*OUTER, *NORMS, *ATTENTION, *biases, *norms, *feed_forward(dimensions))


FAMILY = MegatronFamily(_settings, _attention, {"input_layernorm.": "self_attention.linear_qkv.layer_norm_"}, _rules)
