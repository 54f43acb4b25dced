"""Experts of transformers' models: our grouped product, registered by name, and routers that follow given routes."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from backends.common.step.balance import RoutedTokens, choices
from backends.common.step.grouped_product import add_biases, grouped_linear
from backends.common.trainer.state import ADDED

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
    return add_biases(out, ends, chosen, getattr(experts, f"{name}_bias")) if experts.has_bias else out


def follow_routes(layer: torch.nn.Module, index: int, current: Callable[[], RoutedTokens | None]) -> bool:
    """Let the router in a decoder's layer ``index`` follow the ``current`` call's tokens, if it has any.

    They are not passed down, because FSDP replaces containers in a layer's arguments. Return whether there is a router.
    """

    def follow(router: torch.nn.Module, _: Any, output: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        if (tokens := current()) is None:
            return output
        logits, weights, experts = output
        if tokens.routes is not None:
            experts = tokens.routes.choose(index, experts)
            weights = _weights(router, logits, experts)
        if tokens.balance.loss is not None:
            tokens.routed.setdefault(index, (logits, experts))
        if (loads := tokens.balance.loads) is not None:
            tokens.count(loads, index, choices(logits, experts))
        return logits, weights, experts

    routers = [module for module in layer.modules() if type(module).__name__.lower().endswith("topkrouter")]
    for router in routers:
        router.register_forward_hook(follow)
    return bool(routers)


def _weights(router: Any, logits: Tensor, experts: Tensor) -> Tensor:
    """Return (T, k) weights of given experts, computed like transformers' routers of Qwen3-MoE, gpt-oss (which have a
    bias) and DeepSeek-V3."""
    if hasattr(router, "bias"):
        return logits.gather(1, experts).softmax(dim=-1)
    if not hasattr(router, "e_score_correction_bias"):
        weights = logits.softmax(dim=-1, dtype=torch.float32).gather(1, experts)
        normalizes = getattr(router, "norm_topk_prob", True)  # Qwen3.5's always do
        return (weights / weights.sum(dim=-1, keepdim=True) if normalizes else weights).to(logits.dtype)
    weights = logits.sigmoid().gather(1, experts)
    scale = weights.sum(dim=-1, keepdim=True) + 1e-20 if router.norm_topk_prob else 1.0
    return weights / scale * router.routed_scaling_factor
