"""Layer specs: the modules of Megatron's transformer. Tensors have the same names in checkpoints under all specs."""

from typing import Any, Literal

from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from backends.megatron.attention import Attention, PackedCoreAttention
from backends.megatron.families import MegatronFamily
from backends.megatron.head import ScoredLayer
from backends.megatron.norm import RMSNorm
from slime_like.plugins.options import load_option

Layers = Literal["transformer_engine", "local"]
"""Modules of the layers: Transformer Engine's, or ours, built from torch's operators."""


def block_spec(
    family: MegatronFamily, config: TransformerConfig, attention: Attention, layers: Layers, vp_stage: int | None = None
) -> TransformerBlockSubmodules:
    """Return the spec of all layers of this rank's (virtual) pipeline stage, including the final norm."""
    first = get_transformer_layer_offset(config, vp_stage=vp_stage)
    numbers = range(first, first + get_num_layers_to_build(config, vp_stage=vp_stage))
    experts = {number: _experts_of(config, number) for number in numbers}
    norm: Any = RMSNorm
    if layers == "transformer_engine":
        from megatron.core.extensions.transformer_engine import TENorm

        norm = TENorm
        specs = [transformer_engine_layer_spec(config, count, attention) for count in experts.values()]
    else:
        specs = [local_layer_spec(family, config, number, count) for number, count in experts.items()]
    return TransformerBlockSubmodules(layer_specs=specs, layer_norm=norm)


def _experts_of(config: TransformerConfig, layer: int) -> int | None:
    """Return the number of the layer's experts; ``None`` if it is dense."""
    pattern = config.moe_layer_freq
    return config.num_moe_experts if isinstance(pattern, int) or pattern[layer] else None


def local_layer_spec(
    family: MegatronFamily, config: TransformerConfig, layer: int, num_experts: int | None
) -> ModuleSpec:
    """Return one transformer layer: the family's attention, and a norm that supports sequence parallelism."""
    spec = get_gpt_layer_local_spec(
        num_experts=num_experts,
        moe_grouped_gemm=False,
        qk_layernorm=config.qk_layernorm,
        multi_latent_attention=config.multi_latent_attention,
        normalization="RMSNorm",
    )
    spec.module = ScoredLayer
    spec.submodules.input_layernorm = RMSNorm
    spec.submodules.pre_mlp_layernorm = RMSNorm
    # A norm before experts does not feed a single matrix. It is a separate module in both specs.
    mlp = {"pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_"} if num_experts is None else {}
    spec.submodules.sharded_state_dict_keys_map = family.fused_norms | mlp
    spec.submodules.self_attention = family.attention(config, layer, spec.submodules.self_attention)
    spec.submodules.mlp = family.mlp(spec.submodules.mlp)
    if num_experts is not None:
        load_option("megatron-experts")(spec, family.experts, config.moe_grouped_gemm)
    return spec


def transformer_engine_layer_spec(
    config: TransformerConfig, num_experts: int | None, attention: Attention
) -> ModuleSpec:
    """Return one transformer layer of Transformer Engine's modules: norms fused into the matrices they feed, grouped
    products of experts, and its attention unless ``attention`` is another.

    Not for layers that ``Attention.special`` names. Raises ImportError, with the package's name, if Transformer Engine
    is not installed.
    """
    # Imports Transformer Engine, which only some machines have.
    from backends.megatron.transformer_engine import RotatedDotProductAttention

    spec = get_gpt_layer_with_transformer_engine_spec(
        num_experts=num_experts, moe_grouped_gemm=config.moe_grouped_gemm, qk_layernorm=config.qk_layernorm
    )
    core_attention = RotatedDotProductAttention if attention == "transformer_engine" else PackedCoreAttention
    spec.submodules.self_attention.submodules.core_attention = core_attention
    if num_experts is not None:
        load_option("megatron-experts")(spec, None, False)
    return spec
