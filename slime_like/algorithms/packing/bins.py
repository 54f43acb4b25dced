"""Packing of items into bins of one capacity."""

from collections.abc import Sequence

# Steps of the exhaustive search for fewer bins: some tens of milliseconds. Only a batch with hardly more sequences than
# micro-batches needs it.
_SEARCH_STEPS = 50_000


def first_fit_decreasing(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Put items, longest first, into the first bin with room. At most 11/9 of the optimum plus one bin (Dósa 2007).

    Bins are the leaves of a tree whose nodes know the largest room below them, so an item finds its bin in logarithmic
    time. A bin that isn't open yet has its whole room.

    Args:
        lengths: each 1 to ``capacity``.

    Returns:
        Indices into ``lengths`` of every bin, in the order the bins were opened.
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
    """Search for a packing into at most ``count`` bins, none empty; return ``None`` if none is found.

    The search is exhaustive, longest items first, for cases in which first-fit-decreasing misses by a few bins. Bins
    with equal room are tried once. Packing is NP-hard, so the search gives up after a bounded number of steps.
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
