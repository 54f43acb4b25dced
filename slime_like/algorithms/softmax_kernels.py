"""Triton kernels of ``softmax.row_sums`` and ``softmax.logit_gradient``. Each reads the logits once.

Importing this module needs Triton, which CUDA builds of PyTorch include. ``head.row_kernels`` tells if it is used.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from slime_like.algorithms.softmax import LEAST_MAXIMUM, RowGradients, RowValues, Sums, compute_dtype, row_slopes

_BLOCK = 4096
_WARPS = 8
_LEAST: tl.constexpr = tl.constexpr(LEAST_MAXIMUM)


def row_sums(x: Tensor, temperatures: Tensor | None, column: Tensor, block: int = _BLOCK) -> tuple[Tensor, Sums]:
    """Compute ``softmax.row_sums`` of the scaled logits ``x / temperatures``.

    Args:
        x: (n, V) logits with contiguous rows, which stay unchanged.
        temperatures: (n,) divisors of the logits; 1 by default.
        column: (n,) int64 columns of the targets.
        block: columns that a program reads at a time; a power of 2.
    """
    sums = torch.empty(4, len(x), dtype=compute_dtype(x.dtype), device=x.device)
    scales = torch.ones_like(sums[0]) if temperatures is None else temperatures.to(sums.dtype).reciprocal()
    sizes = len(x), x.shape[1], x.stride(0)
    _row_sums[(len(x),)](x, scales, column, sums, *sizes, BLOCK=block, num_warps=_WARPS)
    maximum, total, weighted, target = sums.unbind()
    return maximum, (total, weighted, target)


def logit_gradient(
    x: Tensor,
    temperatures: Tensor | None,
    column: Tensor,
    softmax: RowValues,
    grads: RowGradients,
    dtype: torch.dtype,
    softcap: float | None = None,
    block: int = _BLOCK,
) -> Tensor:
    """Compute ``softmax.logit_gradient`` of the scaled logits ``x / temperatures``.

    Args:
        x: (n, V) logits with contiguous rows. The result overwrites them if they have its ``dtype``.
        temperatures, column, softmax, grads: as for ``softmax.logit_gradient``.
        dtype: dtype of the result.
        softcap: c, if the logits are ``c * tanh(z / c)``; the result is then the gradient of ``z``.
        block: columns of one program; a power of 2.
    """
    constant, slope, of_target = row_slopes(softmax, grads, temperatures)
    maximum, log_total, _ = softmax
    scales = torch.ones_like(maximum) if temperatures is None else temperatures.to(maximum.dtype).reciprocal()
    values = torch.stack([scales, maximum, log_total, constant, constant if slope is None else slope, of_target])
    dx = x if x.dtype == dtype else torch.empty(x.shape, dtype=dtype, device=x.device)
    sizes = len(x), x.shape[1], x.stride(0), dx.stride(0)
    options = {"HAS_SLOPE": slope is not None, "HAS_CAP": softcap is not None, "BLOCK": block, "num_warps": _WARPS}
    _logit_gradient[(len(x), triton.cdiv(x.shape[1], block))](
        x, dx, column, values, *sizes, 1.0 if softcap is None else softcap, **options
    )
    return dx


@triton.jit
def _row_sums(  # type: ignore[no-untyped-def]
    x,
    scales,
    column,
    sums,
    rows,
    columns,
    stride,
    BLOCK: tl.constexpr,
):
    """Compute the online softmax (arXiv:1805.02867) of one row, and the sum for its entropy."""
    row = tl.program_id(0).to(tl.int64)
    dtype = sums.dtype.element_ty
    scale = tl.load(scales + row)
    maximum = tl.full([], _LEAST, dtype)
    total = tl.full([], 0.0, dtype)
    weighted = tl.full([], 0.0, dtype)
    for start in range(0, columns, BLOCK):
        index = start + tl.arange(0, BLOCK)
        value = tl.load(x + row * stride + index, mask=index < columns, other=float("-inf")).to(dtype) * scale
        higher = tl.maximum(maximum, tl.max(value, 0))
        shifted = value - higher
        weights = tl.exp(shifted)
        # Forbidden tokens (-inf) have weight 0. Their product must be 0 too, not nan.
        products = tl.where(weights > 0, shifted * weights, 0.0)
        shift = maximum - higher
        rescaling = tl.exp(shift)
        weighted = rescaling * (weighted + shift * total) + tl.sum(products, 0)
        total = rescaling * total + tl.sum(weights, 0)
        maximum = higher
    target = tl.load(x + row * stride + tl.load(column + row)).to(dtype) * scale
    tl.store(sums + row, maximum)
    tl.store(sums + rows + row, total)
    tl.store(sums + 2 * rows + row, weighted)
    tl.store(sums + 3 * rows + row, target)


@triton.jit
def _logit_gradient(  # type: ignore[no-untyped-def]
    x,
    dx,
    column,
    values,
    rows,
    columns,
    x_stride,
    dx_stride,
    softcap,
    HAS_SLOPE: tl.constexpr,
    HAS_CAP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute one block of columns of one row. ``values`` are (6, rows), in the order of the wrapper."""
    row = tl.program_id(0).to(tl.int64)
    index = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    exists = index < columns
    dtype = values.dtype.element_ty
    logits = tl.load(x + row * x_stride + index, mask=exists, other=float("-inf")).to(dtype)
    shifted = logits * tl.load(values + row) - tl.load(values + rows + row)
    weights = tl.exp(shifted - tl.load(values + 2 * rows + row))
    factors = tl.load(values + 3 * rows + row)
    if HAS_SLOPE:
        factors += tl.load(values + 4 * rows + row) * tl.where(weights > 0, shifted, 0.0)
    gradient = weights * factors
    gradient += tl.where(index == tl.load(column + row), tl.load(values + 5 * rows + row), 0.0)
    if HAS_CAP:
        ratios = tl.where(logits > float("-inf"), logits / softcap, 0.0)
        gradient *= 1 - ratios * ratios
    tl.store(dx + row * dx_stride + index, gradient.to(dx.dtype.element_ty), mask=exists)
