"""Causal attention of float32 heads in a pack, from a fused projection's output to the context.

One pass does what otherwise are a dozen: it takes queries, keys and values where the projection wrote them, normalises
and rotates them into buffers of one sequence and KV head, which stay in a core's cache, and attends. Nothing is copied
apart, expanded for grouped heads or put together again, forward or backward.

Segments may continue others, as sequences that share a prefix do. Then the buffers hold the path to a segment, and what
is shared stays in them while one after the other of those that continue it takes its place behind it.

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
_QKV = (_HEADS, int64[::1], int64[::1], _VECTOR, _VECTOR, float32, _MATRIX, _MATRIX, float32)


@part()
def _paths(boundaries: Array, parents: Array) -> tuple[Array, int]:
    """How many tokens lie before each segment on its path, and columns of buffers that hold every path: an odd multiple
    of ``LANES``, for which rows share no cache set."""
    offsets, longest = np.zeros(parents.shape[0], np.int64), 0
    for s in range(parents.shape[0]):
        parent = parents[s]
        if parent >= 0:
            offsets[s] = offsets[parent] + boundaries[parent + 1] - boundaries[parent]
        longest = max(longest, offsets[s] + boundaries[s + 1] - boundaries[s])
    return offsets, padded_length(longest) | LANES


@part()
def _tree_end(parents: Array, root: int) -> int:
    """Behind the last segment that continues ``root``."""
    end = root + 1
    while end < parents.shape[0] and parents[end] >= 0:
        end += 1
    return end


@part()
def _block(block: int, offset: int, end: int) -> tuple[int, int]:
    """First and number of the queries from ``offset`` to ``end`` that are among the ``LANES`` from ``block`` on."""
    start = max(block, offset)
    return start, min(block + LANES, end) - start


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
    mixed: Array, first: int, length: int, g: int, norm: Norm, turns: Turns, keys: Array, values: Array, offset: int
) -> None:
    """A segment's keys, turned, and values (L, D) of one KV head, the last two of its group's, from ``offset`` on.

    Meanwhile what lies as many tokens behind comes nearer; others do the same with what they read or write. It is what
    the next segment needs, if that is as long.
    """
    width = keys.shape[1]
    place = mixed.shape[2] - 2 * width
    for t in range(length):
        at = _at(mixed, first + t, g, place)
        _turned(mixed, at, norm, turns, first + t, _ONE, keys, offset + t)
        _bring(mixed, first + length + t, g, place, 2 * width)
        copy(mixed, at + width, values, (offset + t) * width, width)


@kernel(*_QKV, _HEADS, _MATRIX)
def forward(
    mixed: Array,
    boundaries: Array,
    parents: Array,
    query_weight: Array,
    key_weight: Array,
    eps: np.float32,
    cos: Array,
    sin: Array,
    scale: np.float32,
    out: Array,
    lse: Array,
) -> None:
    """Attention of every segment to itself and to what it continues.

    Args:
        mixed: (T, G, (R + 2) * D): of every KV head its R queries, its key and its value. D is a multiple of ``LANES``.
        boundaries: (S + 1,) of the segments on the token axis.
        parents: (S,) the segments that they continue, below 0 for none. What continues one follows it at once.
        query_weight, key_weight: (D,) of the norms of queries and keys; empty without.
        eps: of these norms.
        cos, sin: (T, D / 2).
        scale: of the products of queries and keys.
        out: (T, G, R * D), written; tokens outside of the boundaries are left alone.
        lse: (G * R, T), written: the logarithm of a row's sum of exponentials.
    """
    width, groups, (offsets, pitch) = 2 * cos.shape[1], mixed.shape[1], _paths(boundaries, parents)
    heads = mixed.shape[2] // width - 2
    keys, values = np.empty((pitch, width), np.float32), np.empty((pitch, width), np.float32)
    columns, scores = np.empty((width, pitch), np.float32), np.empty((LANES, pitch), np.float32)
    rows, context = np.zeros((LANES, width), np.float32), np.empty((LANES, width), np.float32)
    query_norm, key_norm, turns = _norm(query_weight, width, eps), _norm(key_weight, width, eps), (cos, sin)
    root = 0
    while root < parents.shape[0]:
        end = _tree_end(parents, root)
        for g in range(groups):
            for s in range(root, end):
                # Tokens count from the path's first.
                first, offset, length = boundaries[s], offsets[s], boundaries[s + 1] - boundaries[s]
                _gather(mixed, first, length, g, key_norm, turns, keys, values, offset)
                transpose(keys, offset, offset + length, columns)
                for h in range(heads):
                    for block in range(offset // LANES * LANES, offset + length, LANES):
                        start, count = _block(block, offset, offset + length)
                        t = first - offset + start
                        seen, padded = start + count, block + LANES
                        for r in range(count):
                            _bring(mixed, t + length + r, g, h * width, width)
                            at = _at(mixed, t + r, g, h * width)
                            _turned(mixed, at, query_norm, turns, t + r, scale, rows, r)
                        multiply(rows, count, columns, width, padded, scores)
                        for r in range(count):
                            lse[g * heads + h, t + r] = softmax(scores, r, start + r + 1, padded)
                        multiply(scores, count, values, seen, width, context)
                        for r in range(count):
                            _bring(out, t + length + r, g, h * width, width)
                            copy(context, r * width, out, _at(out, t + r, g, h * width), width)
        root = end


@part()
def _head_back(
    grad: Array,
    mixed: Array,
    out: Array,
    lse: Array,
    first: int,
    offset: int,
    length: int,
    g: int,
    h: int,
    norm: Norm,
    turns: Turns,
    scale: np.float32,
    weight_grad: Array,
    path: tuple[Array, ...],
    memory: tuple[Array, ...],
) -> None:
    """Gradients of one query head over a segment, in their place in ``mixed``; those of keys and values are added.

    Args:
        path: keys (L, D), keys and values (D, L), and the gradients of keys and values (L, D), of the whole path.
        memory: of ``LANES`` rows: weights and slopes (L wide), queries and two gradients (D wide).
    """
    keys, columns, value_columns, key_grads, value_grads = path
    weights, slopes, rows, grads, row_grads = memory
    width = rows.shape[1]
    lse_row = g * (mixed.shape[2] // width - 2) + h
    for block in range(offset // LANES * LANES, offset + length, LANES):
        start, count = _block(block, offset, offset + length)
        begin, seen, padded = first - offset + start, start + count, block + LANES
        for r in range(count):
            t = begin + r
            at = _at(mixed, t, g, h * width)
            _turned(mixed, at, norm, turns, t, scale, rows, r)
            _bring(mixed, t + length, g, h * width, width)
            _bring(grad, t + length, g, h * width, width)
            copy(grad, _at(grad, t, g, h * width), grads, r * width, width)
        multiply(rows, count, columns, width, padded, weights)
        multiply(grads, count, value_columns, width, padded, slopes)
        for r in range(count):
            t = begin + r
            _bring(out, t + length, g, h * width, width)
            delta = product(grads, r * width, out, _at(out, t, g, h * width), width)
            softmax_back(weights, slopes, r, start + r + 1, padded, lse[lse_row, t], delta)
        add_outer(weights, seen, grads, count, value_grads)
        add_outer(slopes, seen, rows, count, key_grads)
        multiply(slopes, count, keys, seen, width, row_grads)
        for r in range(count):
            t = begin + r
            at = _at(mixed, t, g, h * width)
            _turned_back(row_grads, r, mixed, at, norm, turns, t, scale, weight_grad)


@part()
def _keys_back(
    mixed: Array,
    first: int,
    offset: int,
    length: int,
    g: int,
    norm: Norm,
    turns: Turns,
    weight_grad: Array,
    key_grads: Array,
    value_grads: Array,
) -> None:
    """Gradients of a segment's keys and values, in their place in ``mixed``: all that sees them has added its own."""
    width = key_grads.shape[1]
    place = mixed.shape[2] - 2 * width
    for t in range(length):
        at = _at(mixed, first + t, g, place)
        _turned_back(key_grads, offset + t, mixed, at, norm, turns, first + t, _ONE, weight_grad)
        copy(value_grads, (offset + t) * width, mixed, at + width, width)


@kernel(_HEADS, *_QKV, _HEADS, _MATRIX, _VECTOR, _VECTOR)
def backward(
    grad: Array,
    mixed: Array,
    boundaries: Array,
    parents: Array,
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
    width, groups, (offsets, pitch) = 2 * cos.shape[1], mixed.shape[1], _paths(boundaries, parents)
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
    path = (keys, columns, value_columns, key_grads, value_grads)
    memory = (weights, slopes, rows, grads, row_grads)
    root = 0
    while root < parents.shape[0]:
        end = _tree_end(parents, root)
        query_sum[:] = _ZERO
        key_sum[:] = _ZERO
        for g in range(groups):
            last = root - 1  # on the path
            # Once more behind the last, where all is ended.
            for s in range(root, end + 1):
                parent = parents[s] if s < end else -1
                # What s does not continue has ended, with its gradients.
                while last >= root and last != parent:
                    first, offset, length = boundaries[last], offsets[last], boundaries[last + 1] - boundaries[last]
                    for h in range(heads):
                        _head_back(
                            grad, mixed, out, lse, first, offset, length, g, h, query_norm, turns, scale, query_sum,
                            path, memory,
                        )  # fmt: skip
                    _keys_back(mixed, first, offset, length, g, key_norm, turns, key_sum, key_grads, value_grads)
                    last = parents[last]
                if s < end:
                    last, offset, length = s, offsets[s], boundaries[s + 1] - boundaries[s]
                    _gather(mixed, boundaries[s], length, g, key_norm, turns, keys, values, offset)
                    transpose(keys, offset, offset + length, columns)
                    transpose(values, offset, offset + length, value_columns)
                    key_grads[offset : padded_length(offset + length)] = _ZERO
                    value_grads[offset : padded_length(offset + length)] = _ZERO
        for d in range(query_weight.shape[0]):
            query_weight_grad[d] += query_sum[d]
            key_weight_grad[d] += key_sum[d]
        root = end
