"""DeepSeek-V3 and similar models: latent attention, with the experts of ``blocks``.

Multi-head latent attention (DeepSeek-V2, https://arxiv.org/abs/2405.04434, section 2.1) on packed sequences: Megatron
provides projections, parameters and sharding. The code between the projections is ours for two reasons.
Megatron's positions are correct only for its context parallelism. Under tensor parallelism, its local layers lose other
ranks' part of the shared key's gradient.
"""

from typing import Any, ClassVar

import torch
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_tensor_model_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from torch import Tensor

from backends.megatron.attention import PackedLayout, RotatedCoreAttention
from backends.megatron.families import MegatronFamily
from backends.megatron.families.rules import NORMS, OUTER, Rule, feed_forward, hf, layer_rule
from backends.megatron.families.transforms import Replicated, Split, Transform
from backends.megatron.norm import RMSNorm
from backends.megatron.versions import AsSpecified, Patch, apply_patches
from slime_like.checks.packages import has_transformer_engine
from slime_like.models.dimensions import ModelDimensions

_NORM_EPS = 1e-6


class LatentNorm(RMSNorm):
    """Norm of a compressed query, key or value. The published models do not take its eps from ``config.json``."""

    def __init__(self, config: Any, hidden_size: int, **unused: Any) -> None:
        super().__init__(config, hidden_size, _NORM_EPS)


class PackedLatentAttention(AsSpecified, MLASelfAttention):
    """Megatron's layer, with angles from the micro-batch's ``PackedLayout``."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        # Megatron mistakes the module that wraps the package for the package, and fails if it is not installed.
        installed = multi_latent_attention.HAVE_TE and has_transformer_engine()
        with apply_patches(Patch(multi_latent_attention, "HAVE_TE", installed)):
            super().__init__(*arguments, **options)

    def get_query_key_value_tensors(
        self,
        hidden_states: Tensor,
        key_value_states: Tensor | None = None,
        position_ids: Tensor | None = None,
        packed_seq_params: PackedLayout | None = None,
        **unused: Any,
    ) -> tuple[Tensor, Tensor, Tensor, None, None]:
        """Return (T, H, nope + rope) queries and keys and (T, H, value_dim) values of this rank's heads.

        ``hidden_states``: (T, 1, hidden), or this tensor-parallel rank's part of them under sequence parallelism.
        """
        layout, config = PackedLayout.require(packed_seq_params), self.config
        parts = [config.qk_head_dim, config.qk_pos_emb_head_dim]
        query, query_turning = self._heads(self._query(hidden_states)).split(parts, dim=-1)
        compressed, key_turning = self._compressed(self.linear_kv_down_proj, hidden_states).split(
            [config.kv_lora_rank, parts[1]], dim=-1
        )
        # Every rank uses the shared part of the key for its heads only, so their gradients add up.
        key_turning = copy_to_tensor_model_parallel_region(key_turning)
        keys_and_values, _ = self.linear_kv_up_proj(self.kv_layernorm(self._scattered(compressed)))
        key, value = self._heads(keys_and_values).split([parts[0], config.v_head_dim], dim=-1)
        query_turning, key_turning = layout.rotate(query_turning, key_turning)
        key_turning = key_turning.expand(-1, key.shape[1], -1)
        query, key = torch.cat([query, query_turning], dim=-1), torch.cat([key, key_turning], dim=-1)
        return query, key, value.contiguous(), None, None

    def _query(self, hidden_states: Tensor) -> Tensor:
        if self.config.q_lora_rank is None:
            query, _ = self.linear_q_proj(hidden_states)
        else:
            compressed = self._scattered(self._compressed(self.linear_q_down_proj, hidden_states))
            query, _ = self.linear_q_up_proj(self.q_layernorm(compressed))
        return query

    def _compressed(self, projection: torch.nn.Module, hidden_states: Tensor) -> Tensor:
        """Return (T, 1, rank), whole on every rank. Megatron's local layers share the work of computing it."""
        projected, _ = projection(hidden_states)
        return gather_from_tensor_model_parallel_region(projected)

    def _scattered(self, compressed: Tensor) -> Tensor:
        """Return this rank's tokens if the next projection gathers them."""
        return scatter_to_sequence_parallel_region(compressed) if self.config.sequence_parallel else compressed

    def _heads(self, x: Tensor) -> Tensor:
        return x.reshape(x.shape[0], self.num_attention_heads_per_partition, -1)


def _rule(megatron: str, transform: Transform, hugging_face: str, *sizes: str) -> Rule:
    return layer_rule(f"self_attention.{megatron}.weight", transform, hf(f"self_attn.{hugging_face}.weight", *sizes))


_ROWS, _COLUMNS, _WHOLE = Split(axis=0), Split(axis=1), Replicated()
_QUERY = (_rule("linear_q_proj", _ROWS, "q_proj", "query", "hidden"),)
_COMPRESSED_QUERY = (
    _rule("linear_q_down_proj", _ROWS, "q_a_proj", "query_rank", "hidden"),
    _rule("q_layernorm", _WHOLE, "q_a_layernorm", "query_rank"),
    _rule("linear_q_up_proj", _ROWS, "q_b_proj", "query", "query_rank"),
)
_KEY_VALUE = (
    _rule("linear_kv_down_proj", _ROWS, "kv_a_proj_with_mqa", "compressed", "hidden"),
    _rule("kv_layernorm", _WHOLE, "kv_a_layernorm", "kv_rank"),
    _rule("linear_kv_up_proj", _ROWS, "kv_b_proj", "expanded", "kv_rank"),
    _rule("linear_proj", _COLUMNS, "o_proj", "hidden", "value"),
)


class LatentFamily(MegatronFamily):
    """Layers with latent attention."""

    config = MLATransformerConfig
    fused_norms: ClassVar = {
        "self_attention.q_layernorm.": "self_attention.linear_q_up_proj.layer_norm_",
        "self_attention.kv_layernorm.": "self_attention.linear_kv_up_proj.layer_norm_",
    }

    def settings(self, dimensions: ModelDimensions) -> dict[str, Any]:
        sizes: Any = dimensions.attention
        scaling = dimensions.rope_scaling or {}
        return {
            "q_lora_rank": sizes.query_rank,
            "kv_lora_rank": sizes.kv_rank,
            "qk_head_dim": sizes.nope_dim,
            "qk_pos_emb_head_dim": sizes.rope_dim,
            "v_head_dim": sizes.value_dim,
            "qk_layernorm": True,
            # Megatron's rotary embedding provides only the softmax's scale, which YaRN changes.
            "rope_type": "rope",
            "rotary_scaling_factor": scaling.get("factor", 1.0),
            "mscale_all_dim": scaling.get("mscale_all_dim", 0.0),
        }

    def attention(self, config: TransformerConfig, layer: int, attention: ModuleSpec) -> ModuleSpec:
        attention.module = PackedLatentAttention
        attention.submodules.core_attention = RotatedCoreAttention
        attention.submodules.q_layernorm = attention.submodules.kv_layernorm = LatentNorm
        return attention

    def rules(self, dimensions: ModelDimensions) -> tuple[Rule, ...]:
        query = _COMPRESSED_QUERY if dimensions.attention.sizes(dimensions)["query_rank"] else _QUERY
        return (*OUTER, *NORMS, *query, *_KEY_VALUE, *feed_forward(dimensions))
