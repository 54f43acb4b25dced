"""Operations between projections and attention, for one new float32 token per row."""

import numpy as np
from numba import boolean, float32, int64, uint64

from slime_like.cpu.kernels.compiling import Array, kernel, part

_ZERO, _ONE = np.float32(0.0), np.float32(1.0)


@part()
def _norm_factor(states: Array, row: int, start: int, dim: int, eps: float) -> np.float32:
    """(mean of the squares of one head's states + eps)^-1/2."""
    total = _ZERO
    for i in range(dim):
        total += states[row, start + i] * states[row, start + i]
    return _ONE / np.sqrt(total / np.float32(dim) + eps)


@kernel(
    *(float32[:, ::1], float32[:, ::1], float32[:, ::1], float32[::1], float32[::1], boolean, float32),
    *(float32[:, ::1], float32[:, ::1], int64[::1], uint64, float32[:, :, :, ::1], float32[:, :, :, ::1]),
)
def forward(
    query: Array,
    key: Array,
    value: Array,
    query_weight: Array,
    key_weight: Array,
    is_normed: bool,
    eps: float,
    cos: Array,
    sin: Array,
    positions: Array,
    column: int,
    keys: Array,
    values: Array,
) -> None:
    """Norm and rotate (arXiv:2104.09864, eq. 34) the heads of queries, in place, and of keys; cache keys and values.

    Args:
        query: (rows, heads * head_dim).
        key, value: (rows, kv_heads * head_dim).
        query_weight, key_weight: (head_dim,), those of the root mean square norms of heads; ones where there are none.
        is_normed: if there are.
        cos, sin: (positions, head_dim / 2).
        positions: (rows,).
        keys, values: (at least rows, kv_heads, more than ``column``, head_dim); ``column`` is written.
    """
    # Neither slices, each of which counts references, nor signed indices, which may count from the end.
    dim, kv_heads = np.uint64(keys.shape[3]), np.uint64(keys.shape[1])
    half, heads = dim // np.uint64(2), np.uint64(query.shape[1]) // dim
    for row in range(np.uint64(query.shape[0])):
        position = np.uint64(positions[row])
        for head in range(heads):
            a = head * dim
            b = a + half
            factor = _norm_factor(query, row, a, dim, eps) if is_normed else _ONE
            for i in range(half):
                first = query[row, a + i] * factor * query_weight[i]
                second = query[row, b + i] * factor * query_weight[half + i]
                query[row, a + i] = first * cos[position, i] - second * sin[position, i]
                query[row, b + i] = second * cos[position, i] + first * sin[position, i]
        for head in range(kv_heads):
            a = head * dim
            b = a + half
            factor = _norm_factor(key, row, a, dim, eps) if is_normed else _ONE
            for i in range(half):
                first = key[row, a + i] * factor * key_weight[i]
                second = key[row, b + i] * factor * key_weight[half + i]
                keys[row, head, column, i] = first * cos[position, i] - second * sin[position, i]
                keys[row, head, column, half + i] = second * cos[position, i] + first * sin[position, i]
            for i in range(dim):
                values[row, head, column, i] = value[row, a + i]
