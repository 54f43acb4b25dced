"""Megatron's layers in fewer passes over memory: float32 on a CPU, by the kernels of ``slime_like.fused``.

A layer's parameters are the same, and where a kernel does not know what it is given (context parallelism, long
sequences, a part of a wider array) it computes as it does without.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch.nn.functional as F
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from torch import Tensor

from backends.megatron.attention import PackedLayout
from backends.megatron.norm import RMSNorm
from slime_like.fused.operators import (
    FusedAttention,
    FusedRMSNorm,
    FusedSwiGLU,
    are_served,
    is_served_width,
)

LONGEST = 512
"""Tokens of a sequence above which torch's attention, with its blocks of keys, is faster."""


class FusedNorm(RMSNorm):
    """Forward and backward in one pass each."""

    def forward(self, x: Tensor) -> Tensor:
        """(..., hidden_size) to the same shape."""
        return FusedRMSNorm.apply(x, self.weight, self.eps) if are_served(x, self.weight) else super().forward(x)


class FusedMLP(MLP):
    """Gate, activation and up between the projections in one pass."""

    def __init__(self, config: Any, **options: Any) -> None:
        if config.activation_func != F.silu or not config.gated_linear_unit or config.add_bias_linear:
            raise ValueError("the fused MLP is SwiGLU's, without biases; build any other of Megatron's own MLP")
        submodules = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
        super().__init__(config, submodules, ffn_hidden_size=config.ffn_hidden_size, **options)

    def forward(self, hidden_states: Tensor, per_token_scale: Tensor | None = None, **options: Any) -> Any:
        """(T, 1, H) to the same, and no bias."""
        if per_token_scale is not None or not are_served(hidden_states):
            return super().forward(hidden_states, per_token_scale, **options)
        gate_up, _ = self.linear_fc1(hidden_states)
        return self.linear_fc2(FusedSwiGLU.apply(gate_up))


class FusedSelfAttention(SelfAttention):
    """From the projection's output to the context in one pass: norms, rotary embedding and packed attention."""

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None,
        *given: Any,
        packed_seq_params: PackedLayout | None = None,
        **options: Any,
    ) -> Any:
        """(T, 1, H) to the same, and the output's bias."""
        layout = PackedLayout.given(packed_seq_params)
        if not self._is_fused(hidden_states, layout):
            return super().forward(hidden_states, attention_mask, *given, packed_seq_params=layout, **options)
        assert layout.segments is not None and layout.cos is not None and layout.sin is not None
        mixed, _ = self.get_query_key_value_tensors(hidden_states, split_qkv=False)
        query_norm, key_norm = (n if isinstance(n, RMSNorm) else None for n in (self.q_layernorm, self.k_layernorm))
        context = FusedAttention.apply(
            mixed.squeeze(1),
            None if query_norm is None else query_norm.weight,
            None if key_norm is None else key_norm.weight,
            0.0 if query_norm is None else query_norm.eps,
            layout.cos.squeeze(1),
            layout.sin.squeeze(1),
            np.asarray(layout.segments.host, dtype=np.int64),
            self.core_attention.scale,
        )
        return self.linear_proj(context.unsqueeze(1))

    def _is_fused(self, hidden_states: Tensor, layout: PackedLayout) -> bool:
        segments = layout.segments
        if segments is None or segments.longest > LONGEST or layout.interleaved or self.checkpoint_core_attention:
            return False
        # With more ranks than KV heads a rank has a part of a group's queries.
        whole_groups = self.config.num_query_groups >= self.world_size
        return whole_groups and is_served_width(self.hidden_size_per_attention_head) and are_served(hidden_states)


def fuse(spec: ModuleSpec) -> None:
    """Replace what a layer of ``local_layer_spec`` is made of."""
    layer = spec.submodules
    layer.input_layernorm = layer.pre_mlp_layernorm = FusedNorm
    if layer.mlp.module is MLP:
        layer.mlp = FusedMLP
    attention = layer.self_attention
    if attention.module is SelfAttention:
        attention.module = FusedSelfAttention
        if attention.submodules.q_layernorm is RMSNorm:
            attention.submodules.q_layernorm = attention.submodules.k_layernorm = FusedNorm
