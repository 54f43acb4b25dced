"""Transformer Engine's attention, fed with our positions. Only to be imported where Transformer Engine is installed.

For context parallelism, the zigzag that ``split_for_context_parallel`` makes is what it calls dual chunk swap,
with boundaries of the whole pack. Its two kinds of boundaries, true and padded ones, are one tensor, the padded ones:
padding follows its sequence, so that attention under the mask is exact on the real tokens, and without gaps between
sequences every one of its kernels may be used.
"""

from typing import Any

from megatron.core.extensions.transformer_engine import TEDotProductAttention
from torch import Tensor

from backends.megatron.attention import PackedLayout


class RotatedDotProductAttention(TEDotProductAttention):
    """Megatron's wrapper of Transformer Engine's attention, behind the rotary embedding of the micro-batch's table."""

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedLayout | None = None,
    ) -> Tensor:
        """(T, H, D) queries, (T, G, D) keys and values; returns (T, H * D)."""
        layout = PackedLayout.given(packed_seq_params)
        query, key = layout.rotated(query, key)
        out: Tensor = super().forward(query, key, value, attention_mask, attn_mask_type, attention_bias, layout)
        return out
