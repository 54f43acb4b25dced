"""Transformer Engine's modules in our layers. Only to be imported where Transformer Engine is installed.

For context parallelism, the zigzag that ``split_for_context_parallel`` makes is what it calls dual chunk swap, with
boundaries of the whole pack. Its two kinds of boundaries, true and padded ones, are one tensor, the padded ones:
padding follows its sequence, so that attention under the mask is exact on the real tokens, and without gaps between
sequences every one of its kernels may be used.
"""

from typing import Any

from megatron.core.extensions.transformer_engine import TEDotProductAttention
from torch import Tensor, nn

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


def add_weight_gradients_in_float32(model: nn.Module) -> None:
    """Make linear layers add weight gradients to Megatron's float32 sums within their matrix products.

    Otherwise every micro-batch's gradient is rounded to the model's type first. Megatron's own setting,
    ``gradient_accumulation_fusion``, also applies to its output layer, which requires APEX for it. Layers that compute
    in FP8 would need ``disable_parameter_transpose_cache``, too: in the first micro-batch of a schedule, of which a
    step here has several, they overwrite the sums.
    """
    module: Any
    for module in model.modules():
        if hasattr(module, "fuse_wgrad_accumulation"):
            module.fuse_wgrad_accumulation = True
