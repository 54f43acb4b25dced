"""Root mean square normalisation of float32 rows, forward and backward in one pass each."""

import numpy as np
from numba import float32

from slime_like.cpu.kernels.compiling import kernel

BLOCK_ROWS = 64
"""Whose weight gradients are added up before they join the sum of all: rounding grows with how many, not with T."""
_ZERO, _ONE = np.float32(0.0), np.float32(1.0)


@kernel(float32[:, ::1], float32[::1], float32, float32[:, ::1], float32[::1])
def forward(x: np.ndarray, weight: np.ndarray, eps: np.float32, out: np.ndarray, rstd: np.ndarray) -> None:
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


@kernel(float32[:, ::1], float32[:, ::1], float32[::1], float32[::1], float32[:, ::1], float32[::1])
def backward(
    grad: np.ndarray,
    x: np.ndarray,
    weight: np.ndarray,
    rstd: np.ndarray,
    x_grad: np.ndarray,
    weight_grad: np.ndarray,
) -> None:
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
    for start in range(0, tokens, BLOCK_ROWS):
        block[:] = _ZERO
        for t in range(start, min(start + BLOCK_ROWS, tokens)):
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
