"""Attention of one new float32 token per row over that row's cached keys and values."""

import numpy as np
from numba import float32, int64

from slime_like.cpu.kernels.compiling import Array, kernel, part
from slime_like.cpu.kernels.elementary import exp
from slime_like.cpu.kernels.vectors import LINE, prefetch

# No slices, each of which counts references, nor signed indices, which may count from the end.
_U0, _U1, _U2, _U3, _U4 = (np.uint64(n) for n in range(5))
_ZERO, _ONE, _LOWEST = np.float32(0.0), np.float32(1.0), np.float32(-np.inf)
_STATES, _CACHE = float32[:, ::1], float32[:, :, :, ::1]


@part()
def _place(buffer: Array, row: int, kv_head: int, column: int) -> np.uint64:
    """How many elements lie before that column; kv_head may be one too many: it is the next row's first one."""
    heads, columns, dim = np.uint64(buffer.shape[1]), np.uint64(buffer.shape[2]), np.uint64(buffer.shape[3])
    return ((row * heads + kv_head) * columns + column) * dim


@part()
def _score(
    query: Array,
    row: int,
    keys: Array,
    kv_head: int,
    start: int,
    end: int,
    values: Array,
    scores: Array,
    largest: Array,
) -> None:
    """``scores[g, c] = query . keys[c]`` of every head of a group, and the ``largest`` of each.

    Four columns at a time, whose sums are independent. Meanwhile their values come nearer.
    """
    dim, group = np.uint64(keys.shape[3]), np.uint64(scores.shape[0])
    whole = end - (end - start) % _U4
    for g in range(group):
        largest[g] = _LOWEST
    for c in range(start, whole, _U4):
        ahead = _place(values, row, kv_head, c)
        for i in range(_U0, _U4 * dim, LINE):
            prefetch(values, ahead + i)
        for g in range(group):
            at = (kv_head * group + g) * dim
            s0 = s1 = s2 = s3 = _ZERO
            for i in range(dim):
                x = query[row, at + i]
                s0 += x * keys[row, kv_head, c, i]
                s1 += x * keys[row, kv_head, c + _U1, i]
                s2 += x * keys[row, kv_head, c + _U2, i]
                s3 += x * keys[row, kv_head, c + _U3, i]
            scores[g, c], scores[g, c + _U1], scores[g, c + _U2], scores[g, c + _U3] = s0, s1, s2, s3
            largest[g] = max(largest[g], max(max(s0, s1), max(s2, s3)))
    for c in range(whole, end):
        for g in range(group):
            at = (kv_head * group + g) * dim
            s0 = _ZERO
            for i in range(dim):
                s0 += query[row, at + i] * keys[row, kv_head, c, i]
            scores[g, c] = s0
            largest[g] = max(largest[g], s0)


@part()
def _exponentiate(scores: Array, g: int, start: int, end: int, largest: float, scale: float) -> np.float32:
    """``scores[g, c] = e^(scale (scores[g, c] - largest))`` in place; gives their sum."""
    total = _ZERO
    for c in range(start, end):
        e = exp((scores[g, c] - largest) * scale)
        scores[g, c] = e
        total += e
    return total


@part()
def _mix(
    weights: Array, factors: Array, values: Array, row: int, kv_head: int, start: int, end: int, keys: Array, out: Array
) -> None:
    """``out = factors[g] * sum_c weights[g, c] values[c]`` of every head of a group.

    Four columns at a time, for which ``out`` is read and written once. Meanwhile the next group's keys come nearer.
    """
    dim, group = np.uint64(values.shape[3]), np.uint64(weights.shape[0])
    whole = end - (end - start) % _U4
    first = kv_head * group * dim
    for i in range(first, first + group * dim):
        out[row, i] = _ZERO
    for c in range(start, whole, _U4):
        ahead = _place(keys, row, kv_head + _U1, c)
        for i in range(_U0, _U4 * dim, LINE):
            prefetch(keys, ahead + i)
        for g in range(group):
            at = first + g * dim
            w0, w1, w2, w3 = weights[g, c], weights[g, c + _U1], weights[g, c + _U2], weights[g, c + _U3]
            for i in range(dim):
                v0, v1 = values[row, kv_head, c, i], values[row, kv_head, c + _U1, i]
                v2, v3 = values[row, kv_head, c + _U2, i], values[row, kv_head, c + _U3, i]
                out[row, at + i] += (w0 * v0 + w1 * v1) + (w2 * v2 + w3 * v3)
    for g in range(group):
        at = first + g * dim
        for c in range(whole, end):
            w0 = weights[g, c]
            for i in range(dim):
                out[row, at + i] += w0 * values[row, kv_head, c, i]
        for i in range(dim):
            out[row, at + i] *= factors[g]


@kernel(_STATES, _CACHE, _CACHE, int64[::1], int64, int64, float32, _STATES)
def forward(
    query: Array, keys: Array, values: Array, positions: Array, column: int, window: int, scale: float, out: Array
) -> None:
    """``out = softmax(scale * query keys^T) values`` of every row and head; heads of a group share keys and values.

    Args:
        query, out: (rows, heads * head_dim).
        keys, values: (at least rows, kv_heads, more than ``column``, head_dim), the new tokens' own in ``column``.
        positions: (rows,), of how many tokens each row's keys lie, without gaps, before that column.
        window: how many columns a token sees at most, its column included.
    """
    kv_heads, dim, end = np.uint64(keys.shape[1]), np.uint64(keys.shape[3]), np.uint64(column + 1)
    group = np.uint64(query.shape[1]) // (kv_heads * dim)
    scores, largest = np.empty((group, end), np.float32), np.empty(group, np.float32)
    for row in range(np.uint64(query.shape[0])):
        start = end - np.uint64(min(positions[row] + 1, window))
        for kv_head in range(kv_heads):
            _score(query, row, keys, kv_head, start, end, values, scores, largest)
            for g in range(group):
                largest[g] = _ONE / _exponentiate(scores, g, start, end, largest[g], scale)
            _mix(scores, largest, values, row, kv_head, start, end, keys, out)
