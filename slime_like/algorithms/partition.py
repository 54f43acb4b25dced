"""Distributing sequences over data-parallel ranks and token-bounded micro-batches. Nothing is dropped."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

Partition = list[list[list[int]]]
_Part = tuple[float, object]

# Karmarkar-Karp merges n partial partitions of num_ranks parts each; beyond this many parts the greedy rule, which is
# then indistinguishable, takes over.
_DIFFERENCING_LIMIT = 400_000


def partition_by_tokens(
    lengths: Sequence[int],
    max_tokens: int,
    num_ranks: int,
    *,
    costs: Sequence[float] | None = None,
    equal_counts: bool = True,
) -> Partition:
    """Choose a rank and a micro-batch for every sequence.

    Ranks are balanced by Karmarkar-Karp differencing, then each rank's sequences are laid into as few micro-batches as
    first-fit-decreasing finds. With ``equal_counts`` ranks with fewer micro-batches than the others split theirs
    further; a rank with fewer sequences than that keeps fewer (fill up with ``zero_weight_pack``).

    Args:
        lengths: tokens each sequence occupies, layout padding counted (``padded_length``).
        max_tokens: budget of one micro-batch.
        num_ranks: data-parallel ranks; each gets at least one sequence.
        costs: what to balance ranks by, e.g. ``training_flops``; none means tokens.
        equal_counts: same number of micro-batches on every rank.

    Returns:
        ``[rank][micro_batch]`` lists of indices into ``lengths``, ascending; every index exactly once.

    Raises:
        ValueError: a sequence over the budget (its index is named), a length below 1, or fewer sequences than ranks.

    Example:
        >>> partition_by_tokens([5, 3, 4, 2], max_tokens=8, num_ranks=2)
        [[[0, 3]], [[1, 2]]]
    """
    _check(lengths, max_tokens, num_ranks, costs)
    shares = balance(lengths if costs is None else costs, num_ranks)
    bins = [first_fit_decreasing([lengths[i] for i in share], max_tokens) for share in shares]
    partition = [[[share[k] for k in members] for members in own] for share, own in zip(shares, bins, strict=True)]
    if equal_counts:
        most = max(len(own) for own in partition)
        for own in partition:
            _split_up(own, lengths, most)
    return [sorted(sorted(members) for members in own) for own in partition]


@dataclass(frozen=True, slots=True)
class StreamedPartition:
    """``partition``: full micro-batches, the same number on every rank. ``spare``: indices carried over."""

    partition: Partition
    spare: list[int]


def partition_full_batches(lengths: Sequence[int], max_tokens: int, num_ranks: int) -> StreamedPartition:
    """What can be sent already while sequences still arrive: whole rounds of micro-batches that no further one fits in.

    Micro-batches are filled in order of arrival. One is full when the next sequence no longer fits; full ones are given
    out in rounds of one per rank, and everything else is spare and belongs in front of the next call's sequences.

    Args:
        lengths: tokens each waiting sequence occupies, in order of arrival.
        max_tokens: budget of one micro-batch.
        num_ranks: data-parallel ranks.

    Raises:
        ValueError: a sequence over the budget (its index is named) or a length below 1.
    """
    _check_lengths(lengths, max_tokens)
    full: list[list[int]] = []
    current: list[int] = []
    used = 0
    for index, length in enumerate(lengths):
        if used + length > max_tokens:
            full.append(current)
            current, used = [], 0
        current.append(index)
        used += length
    rounds = len(full) // num_ranks
    sent = full[: rounds * num_ranks]
    spare = [i for members in full[rounds * num_ranks :] for i in members] + current
    return StreamedPartition([sent[rank::num_ranks] for rank in range(num_ranks)], spare)


def balance(costs: Sequence[float], num_parts: int) -> list[list[int]]:
    """Split indices into ``num_parts`` parts of nearly equal cost, none empty, with the largest differencing method.

    Source: Karmarkar and Karp 1982, in Korf's generalisation to k parts. Needs at least ``num_parts`` costs.
    """
    if num_parts == 1:
        return [list(range(len(costs)))]
    if len(costs) * num_parts > _DIFFERENCING_LIMIT:
        parts = _greedy(costs, num_parts)
    else:
        parts = _differencing(costs, num_parts)
    for part in parts:
        if not part:
            donor = max((p for p in parts if len(p) > 1), key=lambda p: sum(costs[i] for i in p))
            lightest = min(donor, key=lambda i: costs[i])
            donor.remove(lightest)
            part.append(lightest)
    return parts


def first_fit_decreasing(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Lay items, longest first, into the first bin with room. At most 11/9 of the optimum plus one bin (Dósa 2007)."""
    bins: list[list[int]] = []
    room = np.zeros(len(lengths), dtype=np.int64)
    for index in np.argsort(-np.asarray(lengths, dtype=np.int64), kind="stable").tolist():
        length = lengths[index]
        fits = room[: len(bins)] >= length
        chosen = int(fits.argmax()) if bins else 0
        if not bins or not fits[chosen]:
            chosen = len(bins)
            bins.append([])
            room[chosen] = capacity
        bins[chosen].append(index)
        room[chosen] -= length
    return bins


def training_flops(lengths: Sequence[int], hidden_size: int, num_parameters: int, num_layers: int) -> list[float]:
    """Forward and backward FLOPs per sequence, for balancing by cost: attention grows with the square of the length.

    ``6 * parameters * n`` for the matrix products, ``6 * layers * hidden * n^2`` for causal attention (half of the
    ``12 * layers * hidden * n^2`` of full attention; Kaplan et al., arXiv:2001.08361, table 1, and PaLM,
    arXiv:2204.02311, appendix B).
    """
    return [6.0 * num_parameters * n + 6.0 * num_layers * hidden_size * n * n for n in lengths]


# ------------------------------------------------------------------------------------------------------------ balancing
def _greedy(costs: Sequence[float], num_parts: int) -> list[list[int]]:
    """Longest processing time: always give the largest cost left to the lightest part."""
    parts: list[list[int]] = [[] for _ in range(num_parts)]
    heap: list[tuple[float, int]] = [(0.0, part) for part in range(num_parts)]
    for index in sorted(range(len(costs)), key=lambda i: -costs[i]):
        load, part = heap[0]
        parts[part].append(index)
        heapq.heapreplace(heap, (load + costs[index], part))
    return parts


def _differencing(costs: Sequence[float], num_parts: int) -> list[list[int]]:
    """Merge the two partial partitions of largest spread, heavy parts with light ones, until one is left.

    A part is ``(load, members)``; members are nested pairs, flattened once at the end, so that a merge costs no copy.
    """
    empty: list[_Part] = [(0.0, None)] * (num_parts - 1)
    heap: list[tuple[float, int, list[_Part]]] = [
        (-float(cost), index, [(float(cost), index), *empty]) for index, cost in enumerate(costs)
    ]
    heapq.heapify(heap)
    serial = len(costs)
    while len(heap) > 1:
        _, _, first = heapq.heappop(heap)
        _, _, second = heap[0]
        merged = [_joined(a, b) for a, b in zip(first, reversed(second), strict=True)]
        merged.sort(key=lambda part: -part[0])
        heapq.heapreplace(heap, (merged[-1][0] - merged[0][0], serial, merged))
        serial += 1
    return [_flatten(members) for _, members in heap[0][2]]


def _joined(first: _Part, second: _Part) -> _Part:
    if first[1] is None or second[1] is None:
        return first if second[1] is None else second
    return first[0] + second[0], (first[1], second[1])


def _flatten(members: object) -> list[int]:
    found: list[int] = []
    stack = [members]
    while stack:
        item = stack.pop()
        if isinstance(item, tuple):
            stack.extend(item)
        elif isinstance(item, int):
            found.append(item)
    return found


def _split_up(bins: list[list[int]], lengths: Sequence[int], count: int) -> None:
    """Split the bin with most tokens in two, until there are ``count`` bins or none holds two sequences."""
    while len(bins) < count:
        splittable = [members for members in bins if len(members) > 1]
        if not splittable:
            return
        fullest = max(splittable, key=lambda members: sum(lengths[i] for i in members))
        bins.remove(fullest)
        halves = balance([lengths[i] for i in fullest], 2)
        bins.extend([fullest[k] for k in half] for half in halves)


def _check(lengths: Sequence[int], max_tokens: int, num_ranks: int, costs: Sequence[float] | None) -> None:
    _check_lengths(lengths, max_tokens)
    if num_ranks < 1 or len(lengths) < num_ranks:
        raise ValueError(
            f"{len(lengths)} sequences cannot give each of {num_ranks} ranks at least one; collect more, or use fewer "
            "ranks"
        )
    if costs is not None and len(costs) != len(lengths):
        raise ValueError(f"{len(costs)} costs for {len(lengths)} sequences; give one each")


def _check_lengths(lengths: Sequence[int], max_tokens: int) -> None:
    for index, length in enumerate(lengths):
        if length > max_tokens:
            raise ValueError(
                f"sequence {index} occupies {length} tokens, over the budget of {max_tokens}; raise max_tokens"
            )
        if length < 1:
            raise ValueError(f"sequence {index} has length {length}; every sequence needs at least one token")
