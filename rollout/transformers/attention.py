"""Attention of one new token per row, without a copy of keys and values for every query head that shares them."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

GROUPED_SDPA = "grouped_sdpa"
"""Its name as an ``attn_implementation``."""


def grouped_sdpa(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """transformers' "sdpa", except where one token of a model with grouped heads is asked for.

    All heads of a group see the same keys, and a single new token sees every key that is not masked. So the heads of a
    group may stand where the kernel expects the queries of several tokens; "sdpa" copies keys and values for each head.

    Args:
        query: (B, heads, n, head_dim).
        key, value: (B, kv_heads, columns, head_dim).
        attention_mask: bool, (B, 1, n, columns), or None.

    Returns:
        (B, n, heads, head_dim), and None for the weights.
    """
    batch, heads, tokens, dim = query.shape
    if tokens != 1 or heads == key.shape[1]:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **options)
    grouped = query.reshape(batch, key.shape[1], heads // key.shape[1], dim)
    output = scaled_dot_product_attention(grouped, key, value, attn_mask=attention_mask, scale=scaling)
    return output.reshape(batch, 1, heads, value.shape[3]), None


def register() -> None:
    """Make the name known to transformers."""
    AttentionInterface.register(GROUPED_SDPA, grouped_sdpa)
    AttentionMaskInterface.register(GROUPED_SDPA, sdpa_mask)
