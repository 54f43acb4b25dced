"""The linear layers of all experts as one product of torch, forward and backward, without the host counting rows."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

ALIGNMENT = 16
"""Bytes that torch's grouped product wants every row to be a multiple of."""


def grouped_linear(x: Tensor, ends: Tensor, weights: Tensor | Sequence[Tensor]) -> Tensor:
    """Each expert's rows times its weight, transposed.

    Args:
        x: (T, K) rows in the order of experts.
        ends: (E,) int32 number of rows up to the end of each expert's, on the device of ``x``.
        weights: (E, N, K); or E of (N, K), which are put together for the length of a product.

    Returns:
        (T, N).
    """
    if isinstance(weights, Tensor):
        return _GroupedLinear.apply(x, ends, _only, weights)
    return _GroupedLinear.apply(x, ends, torch.stack, *weights)


def _only(weights: Sequence[Tensor]) -> Tensor:
    return weights[0]


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ends: Tensor, joined: Callable[..., Tensor], *weights: Tensor) -> Tensor:
        ctx.save_for_backward(x, ends, *weights)
        ctx.joined = joined
        return _product(x, joined(weights).mT, ends)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, ends, *weights = ctx.saved_tensors
        grad = grads[0].contiguous()
        of_x = _product(grad, ctx.joined(weights), ends) if ctx.needs_input_grad[0] else None
        of_weights = _weight_gradients(grad, x, ends)
        return of_x, None, None, *([of_weights] if ctx.joined is _only else of_weights.unbind())


def _product(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    if len(rows) == 0:  # no strides of nothing suit every kernel
        return rows.new_zeros(0, weights.shape[-1])
    if _has_no_shapes(rows):
        return rows @ weights[0]
    return F.grouped_mm(rows, weights, offs=ends)


def _weight_gradients(grad: Tensor, x: Tensor, ends: Tensor) -> Tensor:
    """(E, N, K)."""
    if len(x) == 0:
        return x.new_zeros(len(ends), grad.shape[1], x.shape[1])
    if _has_no_shapes(x):
        return (grad.mT @ x).new_empty(len(ends), grad.shape[1], x.shape[1])
    found = F.grouped_mm(grad.mT, x, offs=ends)
    # On some GPUs torch 2.13 leaves what was in memory where an expert has no rows (pytorch issue 172439).
    idle = ends.diff(prepend=ends.new_zeros(1)) == 0
    return found.masked_fill_(idle[:, None, None], 0.0)


def _has_no_shapes(rows: Tensor) -> bool:
    """Whether torch's grouped product cannot follow these: of shapes alone it takes bfloat16 only.

    A product with one expert's weights stands for it: as many operations, the same result but for its experts.
    """
    return rows.is_meta and rows.dtype != torch.bfloat16
