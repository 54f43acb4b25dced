"""Transformer Engine's modules in our layers. Import this module only if Transformer Engine is installed.

For context parallelism, the zigzag of ``split_for_context_parallel`` matches its dual chunk swap, with boundaries of
the whole pack. Its true and padded boundaries are one tensor, the padded ones. Padding follows its sequence, so masked
attention is exact on the real tokens. Without gaps between sequences, all of its kernels are available.
"""

from typing import Any

from megatron.core.extensions.transformer_engine import TEDotProductAttention
from torch import Tensor, nn

from backends.megatron.attention import PackedLayout


class RotatedDotProductAttention(TEDotProductAttention):
    """Megatron's wrapper of Transformer Engine's attention, after rotary embedding by the micro-batch's table."""

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
        """Map (T, H, D) queries, (T, G, D) keys and values to (T, H * D)."""
        layout = PackedLayout.require(packed_seq_params)
        query, key = layout.rotate(query, key)
        out: Tensor = super().forward(query, key, value, attention_mask, attn_mask_type, attention_bias, layout)
        return out


def add_weight_gradients_in_float32(model: nn.Module) -> None:
    """Make linear layers add weight gradients to Megatron's float32 sums within their matrix products.

    Otherwise every micro-batch's gradient is first rounded to the model's type. Megatron's setting,
    ``gradient_accumulation_fusion``, also applies to its output layer, which requires APEX for it.
    """
    module: Any
    for module in model.modules():
        if hasattr(module, "fuse_wgrad_accumulation"):
            module.fuse_wgrad_accumulation = True
