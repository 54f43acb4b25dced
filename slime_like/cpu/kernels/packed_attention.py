"""Causal attention of float32 heads inside every sequence of a pack, from a fused projection's output to the context.

One pass does what otherwise are a dozen: it takes queries, keys and values where the projection wrote them, normalises
and rotates them into buffers of one sequence and KV head, which stay in a core's cache, and attends. Nothing is copied
apart, expanded for grouped heads or put together again, forward or backward.

Below, a head is the D elements from ``place`` on of token ``t`` and group ``g``. Functions take arrays whole, with
indices: making a view of one would cost more than what is done to a head.
"""

import numpy as np
from numba import float32, int64

from slime_like.cpu.kernels.compiling import Array, kernel, part
from slime_like.cpu.kernels.heads import copy, norm_back, product, turn, turn_back
from slime_like.cpu.kernels.score_rows import add_outer, multiply, padded_length, softmax, softmax_back, transpose
from slime_like.cpu.kernels.tile import LANES
from slime_like.cpu.kernels.vectors import LINE, prefetch

_ZERO, _ONE = np.float32(0.0), np.float32(1.0)
_MATRIX, _VECTOR, _HEADS = float32[:, ::1], float32[::1], float32[:, :, ::1]
Norm = tuple[Array, bool, np.float32]
Turns = tuple[Array, Array]
_QKV = (_HEADS, int64[::1], _VECTOR, _VECTOR, float32, _MATRIX, _MATRIX, float32)


@part()
def _pitch(boundaries: Array) -> int:
    """Columns of buffers that hold every sequence: an odd multiple of ``LANES``, for which rows share no cache set."""
    longest = 0
    for s in range(boundaries.shape[0] - 1):
        longest = max(longest, boundaries[s + 1] - boundaries[s])
    return padded_length(longest) | LANES


@part()
def _at(heads: Array, t: int, g: int, place: int) -> int:
    """Offset of a head in ``heads``."""
    return (t * heads.shape[1] + g) * heads.shape[2] + place


@part()
def _norm(weight: Array, width: int, eps: np.float32) -> Norm:
    """A norm's weight, whether there is one, and its epsilon; without a norm (no weight) a weight of ones."""
    normed = weight.shape[0] > 0
    return weight if normed else np.ones(width, np.float32), normed, eps


@part()
def _rstd(mixed: Array, at: int, width: int, norm: Norm) -> np.float32:
    """Scale of a head before its norm's weight; 1 without a norm."""
    _, normed, eps = norm
    return _ONE / np.sqrt(product(mixed, at, mixed, at, width) / np.float32(width) + eps) if normed else _ONE


@part()
def _turned(mixed: Array, at: int, norm: Norm, turns: Turns, t: int, scale: np.float32, out: Array, row: int) -> None:
    """``out[row] = scale * rotated(norm(head))``, of the head of token ``t`` that lies at ``at``; out is (n, D)."""
    width, (cos, sin) = out.shape[1], turns
    turn(mixed, at, norm[0], _rstd(mixed, at, width, norm) * scale, cos, sin, t * cos.shape[1], out, row * width, width)


@part()
def _turned_back(
    grad: Array,
    row: int,
    mixed: Array,
    at: int,
    norm: Norm,
    turns: Turns,
    t: int,
    scale: np.float32,
    weight_grad: Array,
) -> None:
    """A head's gradient, in its place, from that of what ``_turned`` makes of it, ``grad[row]``; the norm's weight's is
    added."""
    width, (cos, sin), (weight, normed, _) = grad.shape[1], turns, norm
    if not normed:
        turn_back(grad, row * width, scale, cos, sin, t * cos.shape[1], mixed, at, width)
        return
    turn_back(grad, row * width, scale, cos, sin, t * cos.shape[1], grad, row * width, width)
    norm_back(grad, row * width, mixed, at, weight, _rstd(mixed, at, width, norm), weight_grad, width)


@part()
def _bring(heads: Array, t: int, g: int, place: int, count: int) -> None:
    """Elements of a token's group are to come nearer: a head's stand far apart, which no processor foresees."""
    at = np.uint64(_at(heads, t, g, place))
    for i in range(np.uint64(0), np.uint64(count), LINE):
        prefetch(heads, at + i)


@part()
def _gather(
    mixed: Array, first: int, length: int, g: int, norm: Norm, turns: Turns, keys: Array, values: Array
) -> None:
    """A sequence's keys, turned, and values (L, D) of one KV head, the last two of its group's.

    Meanwhile what lies as many tokens behind comes nearer; others do the same with what they read or write. It is what
    the next sequence needs, if that is as long.
    """
    width = keys.shape[1]
    place = mixed.shape[2] - 2 * width
    for t in range(length):
        at = _at(mixed, first + t, g, place)
        _turned(mixed, at, norm, turns, first + t, _ONE, keys, t)
        _bring(mixed, first + length + t, g, place, 2 * width)
        copy(mixed, at + width, values, t * width, width)


@kernel(*_QKV, _HEADS, _MATRIX)
def forward(
    mixed: Array,
    boundaries: Array,
    query_weight: Array,
    key_weight: Array,
    eps: np.float32,
    cos: Array,
    sin: Array,
    scale: np.float32,
    out: Array,
    lse: Array,
) -> None:
    """Attention of every sequence.

    Args:
        mixed: (T, G, (R + 2) * D): of every KV head its R queries, its key and its value. D is a multiple of ``LANES``.
        boundaries: (S + 1,) of the sequences on the token axis.
        query_weight, key_weight: (D,) of the norms of queries and keys; empty without.
        eps: of these norms.
        cos, sin: (T, D / 2).
        scale: of the products of queries and keys.
        out: (T, G, R * D), written; tokens outside of the boundaries are left alone.
        lse: (G * R, T), written: the logarithm of a row's sum of exponentials.
    """
    width, groups, pitch = 2 * cos.shape[1], mixed.shape[1], _pitch(boundaries)
    heads = mixed.shape[2] // width - 2
    keys, values = np.empty((pitch, width), np.float32), np.empty((pitch, width), np.float32)
    columns, scores = np.empty((width, pitch), np.float32), np.empty((LANES, pitch), np.float32)
    rows, context = np.zeros((LANES, width), np.float32), np.empty((LANES, width), np.float32)
    query_norm, key_norm, turns = _norm(query_weight, width, eps), _norm(key_weight, width, eps), (cos, sin)
    for s in range(boundaries.shape[0] - 1):
        first, length = boundaries[s], boundaries[s + 1] - boundaries[s]
        for g in range(groups):
            _gather(mixed, first, length, g, key_norm, turns, keys, values)
            transpose(keys, length, columns)
            for h in range(heads):
                for start in range(0, length, LANES):
                    count = min(LANES, length - start)
                    seen, padded = start + count, padded_length(start + count)
                    for r in range(count):
                        _bring(mixed, first + length + start + r, g, h * width, width)
                        t = first + start + r
                        at = _at(mixed, t, g, h * width)
                        _turned(mixed, at, query_norm, turns, t, scale, rows, r)
                    multiply(rows, count, columns, width, padded, scores)
                    for r in range(count):
                        lse[g * heads + h, first + start + r] = softmax(scores, r, start + r + 1, padded)
                    multiply(scores, count, values, seen, width, context)
                    for r in range(count):
                        _bring(out, first + length + start + r, g, h * width, width)
                        copy(context, r * width, out, _at(out, first + start + r, g, h * width), width)


@part()
def _head_back(
    grad: Array,
    mixed: Array,
    out: Array,
    lse: Array,
    first: int,
    length: int,
    g: int,
    h: int,
    norm: Norm,
    turns: Turns,
    scale: np.float32,
    weight_grad: Array,
    sequence: tuple[Array, ...],
    block: tuple[Array, ...],
) -> None:
    """Gradients of one query head over a sequence, in their place in ``mixed``; those of keys and values are added.

    Args:
        sequence: keys (L, D), keys and values (D, L), and the gradients of keys and values (L, D).
        block: memory of ``LANES`` rows: weights and slopes (L wide), queries and two gradients (D wide).
    """
    keys, columns, value_columns, key_grads, value_grads = sequence
    weights, slopes, rows, grads, row_grads = block
    width = rows.shape[1]
    lse_row = g * (mixed.shape[2] // width - 2) + h
    for start in range(0, length, LANES):
        count = min(LANES, length - start)
        seen, padded = start + count, padded_length(start + count)
        for r in range(count):
            t = first + start + r
            at = _at(mixed, t, g, h * width)
            _turned(mixed, at, norm, turns, t, scale, rows, r)
            _bring(mixed, t + length, g, h * width, width)
            _bring(grad, t + length, g, h * width, width)
            copy(grad, _at(grad, t, g, h * width), grads, r * width, width)
        multiply(rows, count, columns, width, padded, weights)
        multiply(grads, count, value_columns, width, padded, slopes)
        for r in range(count):
            t = first + start + r
            _bring(out, t + length, g, h * width, width)
            delta = product(grads, r * width, out, _at(out, t, g, h * width), width)
            softmax_back(weights, slopes, r, start + r + 1, padded, lse[lse_row, t], delta)
        add_outer(weights, seen, grads, count, value_grads)
        add_outer(slopes, seen, rows, count, key_grads)
        multiply(slopes, count, keys, seen, width, row_grads)
        for r in range(count):
            t = first + start + r
            at = _at(mixed, t, g, h * width)
            _turned_back(row_grads, r, mixed, at, norm, turns, t, scale, weight_grad)


@kernel(_HEADS, *_QKV, _HEADS, _MATRIX, _VECTOR, _VECTOR)
def backward(
    grad: Array,
    mixed: Array,
    boundaries: Array,
    query_weight: Array,
    key_weight: Array,
    eps: np.float32,
    cos: Array,
    sin: Array,
    scale: np.float32,
    out: Array,
    lse: Array,
    query_weight_grad: Array,
    key_weight_grad: Array,
) -> None:
    """Gradients of ``mixed``, in its place, and of the norms' weights from that of ``out`` (arXiv:2205.14135,
    algorithm 4). Tokens outside of the boundaries are left alone.

    Args:
        grad: (T, G, R * D).
        query_weight_grad, key_weight_grad: (D,), written; empty without.
        The others: as ``forward`` was given them, and as it wrote them.
    """
    width, groups, pitch = 2 * cos.shape[1], mixed.shape[1], _pitch(boundaries)
    heads = mixed.shape[2] // width - 2
    keys, values = np.empty((pitch, width), np.float32), np.empty((pitch, width), np.float32)
    columns, value_columns = np.empty((width, pitch), np.float32), np.empty((width, pitch), np.float32)
    key_grads, value_grads = np.empty((pitch, width), np.float32), np.empty((pitch, width), np.float32)
    weights, slopes = np.empty((LANES, pitch), np.float32), np.empty((LANES, pitch), np.float32)
    rows, grads = np.zeros((LANES, width), np.float32), np.zeros((LANES, width), np.float32)
    row_grads = np.empty((LANES, width), np.float32)
    query_norm, key_norm, turns = _norm(query_weight, width, eps), _norm(key_weight, width, eps), (cos, sin)
    query_sum, key_sum = np.empty_like(query_weight), np.empty_like(key_weight)
    query_weight_grad[:] = _ZERO
    key_weight_grad[:] = _ZERO
    for s in range(boundaries.shape[0] - 1):
        first, length = boundaries[s], boundaries[s + 1] - boundaries[s]
        query_sum[:] = _ZERO
        key_sum[:] = _ZERO
        for g in range(groups):
            _gather(mixed, first, length, g, key_norm, turns, keys, values)
            transpose(keys, length, columns)
            transpose(values, length, value_columns)
            key_grads[: padded_length(length)] = _ZERO
            value_grads[: padded_length(length)] = _ZERO
            for h in range(heads):
                _head_back(
                    grad, mixed, out, lse, first, length, g, h, query_norm, turns, scale, query_sum,
                    (keys, columns, value_columns, key_grads, value_grads), (weights, slopes, rows, grads, row_grads),
                )  # fmt: skip
            for t in range(length):
                at = _at(mixed, first + t, g, heads * width)
                _turned_back(key_grads, t, mixed, at, key_norm, turns, first + t, _ONE, key_sum)
                copy(value_grads, t * width, mixed, at + width, width)
        for d in range(query_weight.shape[0]):
            query_weight_grad[d] += query_sum[d]
            key_weight_grad[d] += key_sum[d]
