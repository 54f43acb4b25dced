"""Scores of attention in blocks of rows: products with a sequence's keys and values, softmax, and their gradients."""

import numpy as np

from slime_like.cpu.kernels.compiling import Array, part
from slime_like.cpu.kernels.elementary import exp
from slime_like.cpu.kernels.tile import LANES, ROWS, add_product, exponentials

_ZERO, _ONE = np.float32(0.0), np.float32(1.0)


@part()
def padded_length(count: int) -> int:
    """The next multiple of ``LANES``."""
    return (count + LANES - 1) // LANES * LANES


@part()
def softmax(scores: Array, row: int, count: int, end: int) -> np.float32:
    """Of a row's first ``count`` scores, in place; zeros up to ``end``.

    Returns the logarithm of the exponentials' sum.
    """
    shift, total = exponentials(scores, row * scores.shape[1], end, count)
    inverse = _ONE / total
    for j in range(end):
        scores[row, j] *= inverse
    return shift + np.log(total)


@part()
def softmax_back(
    weights: Array, slopes: Array, row: int, count: int, end: int, lse: np.float32, delta: np.float32
) -> None:
    """A row's weights from its scores, and its scores' gradients from its weights', in place; zeros up to ``end``.

    Args:
        delta: product of the row's context and its gradient.
    """
    for j in range(end):
        weights[row, j] = exp(weights[row, j] - lse)
    for j in range(count, end):
        weights[row, j] = _ZERO
    for j in range(end):
        slopes[row, j] = weights[row, j] * (slopes[row, j] - delta)
    for j in range(count, end):
        slopes[row, j] = _ZERO  # where 0 was multiplied by what may not be a number


@part()
def transpose(rows: Array, start: int, end: int, columns: Array) -> None:
    """Rows from ``start`` to ``end`` of (L, D) to columns of (D, L), zeros behind them."""
    for t in range(start, end):
        for d in range(rows.shape[1]):
            columns[d, t] = rows[t, d]
    for d in range(rows.shape[1]):
        for t in range(end, padded_length(end)):
            columns[d, t] = _ZERO


@part()
def multiply(a: Array, count: int, b: Array, depth: int, width: int, out: Array) -> None:
    """``out = a @ b``: (count, depth) by (depth, width), parts of larger matrices."""
    step, pitch, out_pitch = a.shape[1], b.shape[1], out.shape[1]
    for r in range(0, count, ROWS):
        for j in range(0, width, LANES):
            add_product(a, r * step, step, 1, b, j, pitch, depth, out, r * out_pitch + j, out_pitch, False)


@part()
def add_outer(weights: Array, seen: int, rows: Array, count: int, out: Array) -> None:
    """``out += weights.T @ rows``: of (count, seen) and (count, D) into (seen, D)."""
    pitch, width = weights.shape[1], rows.shape[1]
    for j in range(0, seen, ROWS):
        for d in range(0, width, LANES):
            add_product(weights, j, 1, pitch, rows, d, width, count, out, j * width + d, width, True)
