"""Splitting of costs into parts of nearly equal sums."""

import heapq
from collections.abc import Sequence

_Part = tuple[float, object]

# Karmarkar-Karp merges n partial partitions of num_ranks parts each. Beyond this many parts, the greedy rule is used,
# whose result is then indistinguishable.
_DIFFERENCING_LIMIT = 400_000


def balance(costs: Sequence[float], num_parts: int) -> list[list[int]]:
    """Split indices into ``num_parts`` parts of nearly equal cost, none empty, with the largest differencing method.

    Source: Karmarkar and Karp 1982, in Korf's generalization to k parts.
    """
    if num_parts == 1:
        return [list(range(len(costs)))]
    if len(costs) * num_parts > _DIFFERENCING_LIMIT:
        parts = _greedy(costs, num_parts)
    else:
        empty: list[_Part] = [(0.0, None)] * (num_parts - 1)
        parts = _differencing([[(float(cost), index), *empty] for index, cost in enumerate(costs)])
    for part in parts:
        if not part:
            donor = max((p for p in parts if len(p) > 1), key=lambda p: sum(costs[i] for i in p))
            lightest = min(donor, key=lambda i: costs[i])
            donor.remove(lightest)
            part.append(lightest)
    return parts


def share_out(bins: list[list[int]], num_ranks: int, costs: Sequence[float]) -> list[list[list[int]]]:
    """Give every rank equally many bins, by differencing that starts with one bin per rank.

    Source: balanced largest-first differencing, Michiels, Korst, Aarts and van Leeuwen 2003.
    """
    weighed = sorted(((sum(float(costs[i]) for i in members), k) for k, members in enumerate(bins)), reverse=True)
    rounds: list[list[_Part]] = [list(weighed[k : k + num_ranks]) for k in range(0, len(weighed), num_ranks)]
    return [[bins[k] for k in group] for group in _differencing(rounds)]


def _greedy(costs: Sequence[float], num_parts: int) -> list[list[int]]:
    """Give the largest remaining cost to the lightest part, until none is left (longest processing time)."""
    parts: list[list[int]] = [[] for _ in range(num_parts)]
    heap: list[tuple[float, int]] = [(0.0, part) for part in range(num_parts)]
    for index in sorted(range(len(costs)), key=lambda i: -costs[i]):
        load, part = heap[0]
        parts[part].append(index)
        heapq.heapreplace(heap, (load + costs[index], part))
    return parts


def _differencing(partials: list[list[_Part]]) -> list[list[int]]:
    """Merge the two partial partitions of largest spread, heavy parts with light ones, until one is left.

    If spreads are equal, the larger sum comes first, then the partition made first.

    A partial partition is a list of parts, the heaviest first. A part is ``(load, members)``. Members are nested pairs,
    flattened once at the end, so merges copy nothing.
    """
    heap = [(*_priority(parts), serial, parts) for serial, parts in enumerate(partials)]
    heapq.heapify(heap)
    serial = len(partials)
    while len(heap) > 1:
        first, second = heapq.heappop(heap)[-1], heap[0][-1]
        merged = [_joined(a, b) for a, b in zip(first, reversed(second), strict=True)]
        merged.sort(key=lambda part: -part[0])
        heapq.heapreplace(heap, (*_priority(merged), serial, merged))
        serial += 1
    return [_flatten(members) for _, members in heap[0][-1]]


def _priority(parts: list[_Part]) -> tuple[float, float]:
    """Return negated spread and negated sum of a partial partition: the smallest is merged first."""
    return parts[-1][0] - parts[0][0], -sum(load for load, _ in parts)


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
