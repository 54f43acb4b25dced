"""Layer specs: which modules Megatron's transformer is made of. Checkpoints know their tensors by the same names."""

from __future__ import annotations

from typing import Any

from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig

from backends.megatron.attention import PackedCoreAttention
from backends.megatron.attention_choice import Attention
from backends.megatron.norm import RMSNorm
from backends.megatron.router import BalancedMoELayer, BalancedRouter, RoutedLayer


def block_spec(
    config: TransformerConfig, attention: Attention, vp_stage: int | None = None
) -> TransformerBlockSubmodules:
    """All layers of this rank's (virtual) pipeline stage, the final norm included.

    Transformer Engine's attention comes with its layers; every other one with ours.
    """
    on_engine = attention == "transformer_engine"
    layer = transformer_engine_layer_spec(config) if on_engine else local_layer_spec(config)
    norm = _transformer_engine_norm() if on_engine else RMSNorm
    layers = get_num_layers_to_build(config, vp_stage=vp_stage)
    return TransformerBlockSubmodules(layer_specs=[layer] * layers, layer_norm=norm)


def local_layer_spec(config: TransformerConfig) -> ModuleSpec:
    """One transformer layer of torch operations only: packed attention, and a norm that allows sequence parallelism."""
    spec = get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts,
        moe_grouped_gemm=False,
        qk_layernorm=config.qk_layernorm,
        normalization="RMSNorm",
    )
    spec.submodules.input_layernorm = RMSNorm
    spec.submodules.pre_mlp_layernorm = RMSNorm
    spec.submodules.sharded_state_dict_keys_map = fused_norm_names(config)
    attention = spec.submodules.self_attention.submodules
    attention.core_attention = PackedCoreAttention
    if config.qk_layernorm:
        attention.q_layernorm = RMSNorm
        attention.k_layernorm = RMSNorm
    return _with_balanced_experts(spec, config)


def transformer_engine_layer_spec(config: TransformerConfig) -> ModuleSpec:
    """One transformer layer of Transformer Engine's modules: norms fused into the matrices they feed, its attention.

    Raises ImportError, with the package's name, where Transformer Engine is not installed.
    """
    # Imports Transformer Engine, which is there on some machines only.
    from backends.megatron.transformer_engine import RotatedDotProductAttention

    spec = get_gpt_layer_with_transformer_engine_spec(
        num_experts=config.num_moe_experts, moe_grouped_gemm=False, qk_layernorm=config.qk_layernorm
    )
    spec.submodules.self_attention.submodules.core_attention = RotatedDotProductAttention
    return _with_balanced_experts(spec, config)


def fused_norm_names(config: TransformerConfig) -> dict[str, str]:
    """Local names of norms to canonical ones: Transformer Engine's, which keeps a norm's weight in the matrix it feeds.

    A mixture of experts has no one matrix behind its norm; there the norm stands alone in both specs.
    """
    names = {"input_layernorm.": "self_attention.linear_qkv.layer_norm_"}
    if config.num_moe_experts is None:
        names["pre_mlp_layernorm."] = "mlp.linear_fc1.layer_norm_"
    return names


def _with_balanced_experts(spec: ModuleSpec, config: TransformerConfig) -> ModuleSpec:
    if config.num_moe_experts is not None:
        spec.module = RoutedLayer
        spec.submodules.mlp.module = BalancedMoELayer
        spec.submodules.mlp.submodules.router = BalancedRouter
    return spec


def _transformer_engine_norm() -> Any:
    from megatron.core.extensions.transformer_engine import TENorm

    return TENorm
