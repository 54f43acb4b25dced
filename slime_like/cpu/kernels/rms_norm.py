"""Root mean square normalisation of float32 rows, forward and backward in one pass each.

Alone, and in one pass with the sum of a residual.
"""

import numpy as np
from numba import float32, int64

from slime_like.cpu.kernels.compiling import Array, kernel

_BLOCK_ROWS = 64
"""Whose weight gradients are added up before they join the sum of all: rounding grows with how many, not with T."""
_ZERO, _ONE = np.float32(0.0), np.float32(1.0)
_MATRIX, _VECTOR, _INDEX = float32[:, ::1], float32[::1], int64[::1]


@kernel(_MATRIX, _VECTOR, float32, _MATRIX, _VECTOR)
def forward(x: Array, weight: Array, eps: np.float32, out: Array, rstd: Array) -> None:
    """``out = x * rstd * weight`` with ``rstd = (mean(x^2) + eps)^-1/2`` of every row (arXiv:1910.07467, eq. 4).

    Args:
        x, out: (T, H).
        weight: (H,).
        rstd: (T,), written.
    """
    tokens, hidden = x.shape
    for t in range(tokens):
        total = _ZERO
        for h in range(hidden):
            total += x[t, h] * x[t, h]
        r = _ONE / np.sqrt(total / np.float32(hidden) + eps)
        rstd[t] = r
        for h in range(hidden):
            out[t, h] = x[t, h] * r * weight[h]


@kernel(_MATRIX, _MATRIX, _VECTOR, float32, _MATRIX)
def stream_forward(stream: Array, x: Array, weight: Array, eps: np.float32, out: Array) -> None:
    """``stream += x``, in place, and ``out = forward`` of it; nothing is kept for a backward pass.

    Args:
        stream, out: (rows, H).
        x: (rows, H), or (0, H): nothing is added.
        weight: (H,).
    """
    rows, hidden = stream.shape
    for row in range(rows):
        if x.shape[0] > 0:
            for h in range(hidden):
                stream[row, h] += x[row, h]
        total = _ZERO
        for h in range(hidden):
            total += stream[row, h] * stream[row, h]
        factor = _ONE / np.sqrt(total / np.float32(hidden) + eps)
        for h in range(hidden):
            out[row, h] = stream[row, h] * factor * weight[h]


@kernel(_MATRIX, _MATRIX, _VECTOR, _VECTOR, _MATRIX, _VECTOR)
def backward(grad: Array, x: Array, weight: Array, rstd: Array, x_grad: Array, weight_grad: Array) -> None:
    """Gradients of ``x`` and ``weight`` from that of ``out``.

    With n = x * rstd and g = grad * weight: ``x_grad = rstd * (g - n * mean(g * n))``, ``weight_grad = sum(grad * n)``.

    Args:
        grad, x, x_grad: (T, H).
        weight, weight_grad: (H,).
        rstd: (T,), as ``forward`` wrote it.
    """
    tokens, hidden = x.shape
    weight_grad[:] = _ZERO
    block = np.empty(hidden, np.float32)
    for start in range(0, tokens, _BLOCK_ROWS):
        block[:] = _ZERO
        for t in range(start, min(start + _BLOCK_ROWS, tokens)):
            r, projection = rstd[t], _ZERO
            for h in range(hidden):
                product = grad[t, h] * x[t, h] * r
                block[h] += product
                projection += product * weight[h]
            projection *= r / np.float32(hidden)
            for h in range(hidden):
                x_grad[t, h] = r * (grad[t, h] * weight[h] - x[t, h] * projection)
        for h in range(hidden):
            weight_grad[h] += block[h]


@kernel(_MATRIX, _MATRIX, _INDEX, _VECTOR, float32, _MATRIX, _MATRIX, _VECTOR)
def sum_forward(
    added: Array, residual: Array, rows: Array, weight: Array, eps: np.float32, total: Array, out: Array, rstd: Array
) -> None:
    """``total = added + residual`` of the rows that are named, and ``out = forward`` of it.

    Args:
        added, residual: (T, H).
        rows: (n,) of T.
        weight: (H,).
        total, out: (n, H), written.
        rstd: (n,), written.
    """
    hidden = added.shape[1]
    for r in range(rows.shape[0]):
        t, square = rows[r], _ZERO
        for h in range(hidden):
            total[r, h] = added[t, h] + residual[t, h]
        for h in range(hidden):
            square += total[r, h] * total[r, h]
        factor = _ONE / np.sqrt(square / np.float32(hidden) + eps)
        rstd[r] = factor
        for h in range(hidden):
            out[r, h] = total[r, h] * factor * weight[h]


@kernel(_MATRIX, _MATRIX, _MATRIX, _INDEX, _VECTOR, _VECTOR, _MATRIX, _VECTOR)
def sum_backward(
    grad: Array,
    carried: Array,
    total: Array,
    rows: Array,
    weight: Array,
    rstd: Array,
    total_grad: Array,
    weight_grad: Array,
) -> None:
    """Gradients of ``total`` and ``weight`` from those of ``out`` and, past the norm, of ``total``; see
    ``backward``.

    Args:
        grad, carried, total: (n, H).
        rows: (n,) of T, none of them twice.
        weight: (H,).
        rstd: (n,), as ``sum_forward`` wrote it.
        total_grad: (T, H), written where ``rows`` says.
        weight_grad: (H,), written.
    """
    hidden = grad.shape[1]
    weight_grad[:] = _ZERO
    block = np.empty(hidden, np.float32)
    for start in range(0, rows.shape[0], _BLOCK_ROWS):
        block[:] = _ZERO
        for r in range(start, min(start + _BLOCK_ROWS, rows.shape[0])):
            t, factor, projection = rows[r], rstd[r], _ZERO
            for h in range(hidden):
                product = grad[r, h] * total[r, h] * factor
                block[h] += product
                projection += product * weight[h]
            projection *= factor / np.float32(hidden)
            for h in range(hidden):
                total_grad[t, h] = carried[r, h] + factor * (grad[r, h] * weight[h] - total[r, h] * projection)
        for h in range(hidden):
            weight_grad[h] += block[h]
