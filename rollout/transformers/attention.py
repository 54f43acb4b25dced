"""Attention of one new token per row that does not copy keys and values for each query head sharing them."""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

GROUPED_SDPA = "grouped_sdpa"
"""Name for ``attn_implementation``."""


def grouped_sdpa(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Compute transformers' "sdpa", with a faster path for a single token and grouped heads.

    All heads of a group see the same keys, and a single new token sees every key that is not masked. So the heads of a
    group can take the place of several tokens' queries, whereas "sdpa" copies keys and values for each head. On a CPU,
    two batched matrix products are faster than the kernel for so few rows.

    Args:
        query: (B, heads, n, head_dim).
        key, value: (B, kv_heads, columns, head_dim).
        attention_mask: bool, (B, 1, n, columns), or None.

    Returns:
        Output (B, n, heads, head_dim), and None instead of the weights.
    """
    batch, heads, tokens, dim = query.shape
    if tokens != 1 or heads == key.shape[1]:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **options)
    grouped = query.reshape(batch, key.shape[1], heads // key.shape[1], dim)
    if query.device.type == "cpu":
        scale = dim**-0.5 if scaling is None else scaling
        return _products(grouped, key, value, attention_mask, scale).reshape(batch, 1, heads, value.shape[3]), None
    output = scaled_dot_product_attention(grouped, key, value, attn_mask=attention_mask, scale=scaling)
    return output.reshape(batch, 1, heads, value.shape[3]), None


def _products(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """Compute attention of queries (B, kv_heads, n, head_dim) that all see the same columns."""
    batch, groups, rows, _ = query.shape
    scores = torch.bmm(query.flatten(0, 1) * scale, key.flatten(0, 1).transpose(1, 2))
    if mask is not None:
        scores.view(batch, groups * rows, -1).masked_fill_(~mask[:, 0], -math.inf)
    return torch.bmm(scores.softmax(dim=-1), value.flatten(0, 1)).view(batch, groups, rows, value.shape[3])


def register() -> None:
    AttentionInterface.register(GROUPED_SDPA, grouped_sdpa)
    AttentionMaskInterface.register(GROUPED_SDPA, sdpa_mask)
