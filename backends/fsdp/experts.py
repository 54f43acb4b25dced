"""Experts implementation for transformers' models with our grouped product, registered by name."""

from typing import Any

import torch
from torch import Tensor

from backends.common.step.grouped_product import grouped_linear
from backends.common.trainer.roles import ADDED

NAME = "slime_like_grouped"


def forward(experts: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Replace transformers' ``grouped_mm_experts_forward``, whose gradients of idle experts depend on the GPU.

    Args:
        experts: a module of transformers' class decorator, with weights of all experts in one tensor.
        hidden_states: (T, H).
        top_k_index, top_k_weights: (T, k) experts of every token, and their weights.

    Returns:
        (T, H).
    """
    chosen, order = top_k_index.flatten().sort()
    numbers = torch.arange(experts.num_experts, device=chosen.device)
    ends = torch.searchsorted(chosen, numbers, right=True, out_int32=True)
    rows = hidden_states.index_select(0, order // top_k_index.shape[-1])
    inner = _linear(experts, "gate_up_proj" if experts.has_gate else "up_proj", rows, ends, chosen)
    inner = experts._apply_gate(inner) if experts.has_gate else experts.act_fn(inner)
    out = _linear(experts, "down_proj", inner, ends, chosen) * top_k_weights.flatten().index_select(0, order)[:, None]
    # Put every token's k results side by side again; they are summed in float32 internally.
    whole = out.index_select(0, order.argsort()).view(*top_k_index.shape, -1).sum(dim=1)
    return whole.to(hidden_states.dtype)


def _linear(experts: Any, name: str, rows: Tensor, ends: Tensor, chosen: Tensor) -> Tensor:
    weights: Tensor = getattr(experts, name)
    rows = rows.to(weights.dtype)
    out = grouped_linear(rows, ends, weights.mT if experts.is_transposed else weights)
    if name in experts._modules.get(ADDED, ()):
        out = out + experts.added[name](rows, ends)
    return out + getattr(experts, f"{name}_bias").index_select(0, chosen) if experts.has_bias else out
