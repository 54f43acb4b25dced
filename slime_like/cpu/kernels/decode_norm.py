"""The sum that a layer's residual stream is, and its norm, in one pass."""

import numpy as np
from numba import float32

from slime_like.cpu.kernels.compiling import Array, kernel

_ZERO, _ONE = np.float32(0.0), np.float32(1.0)


@kernel(float32[:, ::1], float32[:, ::1], float32[::1], float32, float32[:, ::1])
def forward(stream: Array, x: Array, weight: Array, eps: float, out: Array) -> None:
    """``stream += x``, in place, and ``out = stream * (mean(stream^2) + eps)^-1/2 * weight`` of every row.

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
