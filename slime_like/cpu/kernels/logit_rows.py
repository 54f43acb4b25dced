"""Rows of float32 logits, from a chunk's products to the sums that logprobs and entropies are made of, and back.

For each token's row one pass in a core's cache, instead of a pass over the chunk for every operator.
"""

import numpy as np
from numba import float32, int64

from slime_like.cpu.kernels.compiling import Array, kernel
from slime_like.cpu.kernels.elementary import exp
from slime_like.cpu.kernels.tile import LANES, exponentials

_ZERO = np.float32(0.0)
_LEAST = np.float32(-1e30)
"""Finite, so that its product with a weight of 0 is 0, whatever else it is multiplied by."""
_MATRIX, _VECTOR, _COLUMNS = float32[:, ::1], float32[::1], int64[::1]


@kernel(_MATRIX, _VECTOR, _COLUMNS, _VECTOR, _MATRIX)
def forward(products: Array, temperatures: Array, columns: Array, maximum: Array, sums: Array) -> None:
    """Of ``x = products / temperatures``, row by row.

    Args:
        products: (n, V).
        temperatures: (n,).
        columns: (n,) of the targets.
        maximum: (n,), written: m, the largest x.
        sums: (3, n), written: sums of e^(x - m) and of e^(x - m) (x - m), and the target's x.
    """
    count, width = products.shape
    padded = (width + LANES - 1) // LANES * LANES
    scaled, weights = np.empty(padded, np.float32), np.empty(padded, np.float32)
    for r in range(count):
        for j in range(width):
            scaled[j] = weights[j] = products[r, j] / temperatures[r]
        maximum[r], sums[0, r] = exponentials(weights, 0, padded, width)
        product = _ZERO
        for j in range(width):
            shifted = scaled[j] - maximum[r]
            product += weights[j] * (_LEAST if shifted < _LEAST else shifted)
        sums[1, r], sums[2, r] = product, scaled[columns[r]]


@kernel(_MATRIX, _VECTOR, _COLUMNS, *[_VECTOR] * 6)
def backward(
    products: Array,
    temperatures: Array,
    columns: Array,
    maximum: Array,
    log_total: Array,
    entropy: Array,
    grad_logprobs: Array,
    grad_targets: Array,
    grad_entropy: Array,
) -> None:
    """``products`` become their gradient: ``d logprob = onehot - p`` and ``d H = -p (log p + H)``, over temperatures.

    Args:
        maximum, log_total: (n,) of the whole vocabulary; what the log-sum-exp is above its maximum.
        entropy: (n,).
        grad_logprobs, grad_entropy: (n,).
        grad_targets: (n,), that of the logprob where the target is one of these columns, else 0.
        The others: as ``forward`` was given them.
    """
    for r in range(products.shape[0]):
        per_weight = np.exp(-log_total[r]) / temperatures[r]  # p = exp(shifted) exp(-log_total)
        constant = (grad_entropy[r] * (log_total[r] - entropy[r]) - grad_logprobs[r]) * per_weight
        slope = -grad_entropy[r] * per_weight
        for j in range(products.shape[1]):
            shifted = products[r, j] / temperatures[r] - maximum[r]
            weight = exp(shifted)
            products[r, j] = weight * (constant + slope * (_LEAST if shifted < _LEAST else shifted))
        products[r, columns[r]] += grad_targets[r] / temperatures[r]
