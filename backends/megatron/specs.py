"""Layer specs: which modules Megatron's transformer is made of. Parameter names stay Megatron's canonical ones."""

from __future__ import annotations

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig

from backends.megatron.attention import PackedCoreAttention
from backends.megatron.norm import RMSNorm
from backends.megatron.router import BalancedMoELayer, BalancedRouter, RoutedLayer


def local_layer_spec(config: TransformerConfig) -> ModuleSpec:
    """One transformer layer of torch operations only: packed attention, and a norm that allows sequence parallelism."""
    spec = get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts,
        moe_grouped_gemm=False,
        qk_layernorm=config.qk_layernorm,
        normalization="RMSNorm",
    )
    if config.num_moe_experts is not None:
        spec.module = RoutedLayer
        spec.submodules.mlp.module = BalancedMoELayer
        spec.submodules.mlp.submodules.router = BalancedRouter
    spec.submodules.input_layernorm = RMSNorm
    spec.submodules.pre_mlp_layernorm = RMSNorm
    attention = spec.submodules.self_attention.submodules
    attention.core_attention = PackedCoreAttention
    if config.qk_layernorm:
        attention.q_layernorm = RMSNorm
        attention.k_layernorm = RMSNorm
    return spec


def local_block_spec(config: TransformerConfig, vp_stage: int | None = None) -> TransformerBlockSubmodules:
    """All layers of this rank's (virtual) pipeline stage, the final norm included."""
    layers = get_num_layers_to_build(config, vp_stage=vp_stage)
    return TransformerBlockSubmodules(layer_specs=[local_layer_spec(config)] * layers, layer_norm=RMSNorm)
