"""Linear layers of all experts as one grouped product, forward and backward, without counting rows on the host."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

ALIGNMENT = 16
"""Row alignment in bytes that torch's grouped product requires."""


def grouped_linear(x: Tensor, ends: Tensor, weights: Tensor | Sequence[Tensor]) -> Tensor:
    """Multiply each expert's rows by its transposed weight.

    Args:
        x: (T, K) rows in the order of experts.
        ends: (E,) int32 end of each expert's rows, on the device of ``x``.
        weights: (E, N, K); or E of (N, K), which are stacked for the duration of a product.

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
        if not any(ctx.needs_input_grad[3:]):
            return of_x, None, None, *(None for _ in weights)
        of_weights = _weight_gradients(grad, x, ends)
        return of_x, None, None, *([of_weights] if ctx.joined is _only else of_weights.unbind())


def add_biases(x: Tensor, ends: Tensor, experts: Tensor, biases: Tensor) -> Tensor:
    """Add each row's bias to (T, N) rows in the order of ``experts`` (T,), given (E, N) biases.

    A grouped product with ones sums the gradient in float32 and in a fixed order. The backward pass of ``index_select``
    would add 16-bit numbers atomically.
    """
    return _AddBiases.apply(x, ends, experts, biases)


class _AddBiases(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ends: Tensor, experts: Tensor, biases: Tensor) -> Tensor:
        ctx.save_for_backward(ends)
        return x + biases.index_select(0, experts)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (ends,), grad = ctx.saved_tensors, grads[0].contiguous()
        if not ctx.needs_input_grad[3]:
            return grad, None, None, None
        ones = grad.new_ones(len(grad), ALIGNMENT // grad.element_size())
        return grad, None, None, _weight_gradients(grad, ones, ends)[..., 0]


def _product(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    if len(rows) == 0:  # no strides of an empty tensor suit every kernel
        return rows.new_zeros(0, weights.shape[-1])
    if _has_no_shapes(rows):
        return rows @ weights[0]
    return F.grouped_mm(rows, weights, offs=ends)


def _weight_gradients(grad: Tensor, x: Tensor, ends: Tensor) -> Tensor:
    """Return (E, N, K) gradients."""
    if len(x) == 0:
        return x.new_zeros(len(ends), grad.shape[1], x.shape[1])
    if _has_no_shapes(x):
        return (grad.mT @ x).new_empty(len(ends), grad.shape[1], x.shape[1])
    found = F.grouped_mm(grad.mT, x, offs=ends)
    # On some GPUs, torch 2.13 leaves uninitialized memory for experts without rows (pytorch issue 172439).
    idle = ends.diff(prepend=ends.new_zeros(1)) == 0
    return found.masked_fill_(idle[:, None, None], 0.0)


def _has_no_shapes(rows: Tensor) -> bool:
    """Return whether torch's grouped product cannot trace these rows: for shapes it accepts only bfloat16.

    The product with one expert's weights replaces it: same operations and, except for the experts axis, same result.
    """
    return rows.is_meta and rows.dtype != torch.bfloat16
