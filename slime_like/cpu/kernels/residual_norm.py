"""The norm behind a residual sum, in one pass with the sum; and its gradient, in one pass with the residual's."""

import numpy as np
from numba import float32, int64

from slime_like.cpu.kernels.compiling import kernel
from slime_like.cpu.kernels.rms_norm import BLOCK_ROWS

_ZERO, _ONE = np.float32(0.0), np.float32(1.0)
_MATRIX, _VECTOR, _INDEX = float32[:, ::1], float32[::1], int64[::1]


@kernel(_MATRIX, _MATRIX, _INDEX, _VECTOR, float32, _MATRIX, _MATRIX, _VECTOR)
def forward(
    added: np.ndarray,
    residual: np.ndarray,
    rows: np.ndarray,
    weight: np.ndarray,
    eps: np.float32,
    total: np.ndarray,
    out: np.ndarray,
    rstd: np.ndarray,
) -> None:
    """``total = added + residual`` of the rows that are named, and ``out = rms_norm.forward`` of it.

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
def backward(
    grad: np.ndarray,
    carried: np.ndarray,
    total: np.ndarray,
    rows: np.ndarray,
    weight: np.ndarray,
    rstd: np.ndarray,
    total_grad: np.ndarray,
    weight_grad: np.ndarray,
) -> None:
    """Gradients of ``total`` and ``weight`` from those of ``out`` and, past the norm, of ``total``; see
    ``rms_norm.backward``.

    Args:
        grad, carried, total: (n, H).
        rows: (n,) of T, none of them twice.
        weight: (H,).
        rstd: (n,), as ``forward`` wrote it.
        total_grad: (T, H), written where ``rows`` says.
        weight_grad: (H,), written.
    """
    hidden = grad.shape[1]
    weight_grad[:] = _ZERO
    block = np.empty(hidden, np.float32)
    for start in range(0, rows.shape[0], BLOCK_ROWS):
        block[:] = _ZERO
        for r in range(start, min(start + BLOCK_ROWS, rows.shape[0])):
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
