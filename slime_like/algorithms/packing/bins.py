"""Laying items into bins of one capacity."""

from collections.abc import Sequence

# Steps of the exhaustive search for fewer micro-batches, which only a batch of hardly more sequences than micro-batches
# comes to: some tens of milliseconds.
_SEARCH_STEPS = 50_000


def first_fit_decreasing(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Lay items, longest first, into the first bin with room. At most 11/9 of the optimum plus one bin (Dósa 2007).

    Bins are the leaves of a tree whose nodes know the largest room below them, so that an item finds its bin in
    logarithmic time; a bin not opened yet has all of its room. ``lengths`` are 1 to ``capacity``, of which the result
    has the indices of every bin, in the order the bins were opened.
    """
    leaves = 1 << max(len(lengths) - 1, 0).bit_length()
    room = [capacity] * (2 * leaves)
    bins: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        node = 1
        while node < leaves:
            node = 2 * node + (room[2 * node] < lengths[index])
        if node - leaves == len(bins):
            bins.append([])
        bins[node - leaves].append(index)
        room[node] -= lengths[index]
        while node := node // 2:
            room[node] = max(room[2 * node], room[2 * node + 1])
    return bins


def pack_into(lengths: Sequence[int], capacity: int, count: int) -> list[list[int]] | None:
    """As ``first_fit_decreasing`` into at most ``count`` bins, none empty; ``None`` if there is no way.

    An exhaustive search, longest first, worth it where first-fit-decreasing misses by a few bins. Bins with equal room
    are tried once. Packing is NP-hard: after a bounded number of steps the search ends as if there were no way.
    """
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    room, bins = [capacity] * count, [list[int]() for _ in range(count)]
    tried: list[set[int]] = [set()]
    chosen: list[int] = []
    for _ in range(_SEARCH_STEPS):
        depth = len(chosen)
        if depth == len(order):
            return [members for members in bins if members]
        length = lengths[order[depth]]
        slot = next((k for k, free in enumerate(room) if free >= length and free not in tried[-1]), None)
        if slot is None:
            if not chosen:
                return None
            tried.pop()
            last = chosen.pop()
            room[last] += lengths[bins[last].pop()]
            continue
        tried[-1].add(room[slot])
        tried.append(set())
        chosen.append(slot)
        bins[slot].append(order[depth])
        room[slot] -= length
    return None
