"""Causal attention inside every sequence of a pack, on one rank."""

from typing import Any

import torch
from torch import Tensor

from backends.common.attention.kernels import AttentionKernel, Segments


class _PackedAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, segments: Segments, scale: float, kernel: AttentionKernel
    ) -> Tensor:
        out, lse = kernel.forward(q, k, v, segments, segments, True, scale)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.setting = (segments, scale, kernel)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        segments, scale, kernel = ctx.setting
        dq, dk, dv = kernel.backward(grads[0].contiguous(), q, k, v, out, lse, segments, segments, True, scale)
        return dq, dk, dv, None, None, None


def packed_attention(
    q: Tensor, k: Tensor, v: Tensor, segments: Segments, scale: float, kernel: AttentionKernel
) -> Tensor:
    """(T, H, D) queries, (T, G, D) keys and values in, (T, H, D) out; differentiable."""
    return _PackedAttention.apply(q, k, v, segments, scale, kernel)
