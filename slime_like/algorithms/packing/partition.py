"""Distribution of sequences over data-parallel ranks and token-bounded micro-batches. Nothing is dropped."""

import heapq
from collections.abc import Sequence
from typing import TypeVar

from torch import Tensor

Partition = list[list[list[int]]]
_Number = TypeVar("_Number", int, float)
_Part = tuple[float, object]

# Karmarkar-Karp merges n partial partitions of num_ranks parts each. Beyond this many parts, the greedy rule is used,
# whose result is then indistinguishable.
_DIFFERENCING_LIMIT = 400_000


def partition_by_tokens(
    lengths: Sequence[int] | Tensor, max_tokens: int, num_ranks: int, *, costs: Sequence[float] | Tensor | None = None
) -> Partition:
    """Choose a rank and a micro-batch for every sequence.

    Karmarkar-Karp differencing balances ranks. First-fit-decreasing then packs each rank's sequences into few
    micro-batches, and differencing spreads them evenly, since the largest micro-batch decides the memory of a step.

    All ranks get equally many micro-batches. Ranks with fewer split theirs; a rank with too few sequences for that gets
    the cheapest of the others. If there are too few sequences altogether, micro-batches are packed first and then
    distributed. If no equal counts are found (three sequences of the budget's size for two ranks), some ranks have
    fewer: fill up with ``zero_weight_pack``.

    Args:
        lengths: (N,) tokens that each sequence occupies, with layout padding (``padded_length``).
        max_tokens: budget of one micro-batch.
        num_ranks: data-parallel ranks; each gets at least one sequence.
        costs: (N,) costs to balance ranks by, such as ``training_flops``; tokens by default.

    Returns:
        ``[rank][micro_batch]`` lists of indices into ``lengths``, ascending; every index exactly once.

    Raises:
        ValueError: a sequence is over the budget or has no tokens, or there are fewer sequences than ranks.

    Example:
        >>> partition_by_tokens([5, 3, 4, 2], max_tokens=8, num_ranks=2)
        [[[0, 3]], [[1, 2]]]
    """
    lengths = _as_list(lengths)
    costs = lengths if costs is None else _as_list(costs)
    _check(lengths, max_tokens)
    if len(lengths) < num_ranks:
        raise ValueError(
            f"{len(lengths)} sequences cannot give each of {num_ranks} ranks at least one; collect more, or use fewer "
            "ranks"
        )
    shares = balance(costs, num_ranks)
    bins = [first_fit_decreasing([lengths[i] for i in share], max_tokens) for share in shares]
    partition = [[[share[k] for k in bin_] for bin_ in rank] for share, rank in zip(shares, bins, strict=True)]
    if not _even_out(partition, lengths, costs):
        partition = _even_partition(lengths, max_tokens, num_ranks, costs) or partition
    return [sorted(sorted(members) for members in _level_bins(batches, lengths)) for batches in partition]


def partition_full_batches(lengths: Sequence[int] | Tensor, max_tokens: int, num_ranks: int) -> Partition:
    """Partition a growing list of sequences into full micro-batches that can be sent already.

    Micro-batches are filled in order of arrival. One is full when the next sequence doesn't fit. Full ones are
    distributed in rounds of one per rank. Put the rest before the sequences of the next call.

    Args:
        lengths: tokens that each waiting sequence occupies, in order of arrival.
        max_tokens: budget of one micro-batch.
        num_ranks: data-parallel ranks.

    Returns:
        ``[rank][micro_batch]`` lists of indices into ``lengths``, equally many on every rank.

    Raises:
        ValueError: a sequence is over the budget or has no tokens.
    """
    lengths = _as_list(lengths)
    _check(lengths, max_tokens)
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
    return [sent[rank::num_ranks] for rank in range(num_ranks)]


def training_flops(
    lengths: Sequence[int] | Tensor, attention_width: int, active_parameters: int, num_layers: int
) -> list[float]:
    """Compute forward and backward FLOPs per sequence, to balance by. Attention grows quadratically with the length.

    ``6 * parameters * n`` for the matrix products, ``6 * layers * width * n^2`` for causal attention (half of the
    ``12 * layers * width * n^2`` of full attention; Kaplan et al., arXiv:2001.08361, table 1, and PaLM,
    arXiv:2204.02311, appendix B).

    Args:
        lengths: (N,) tokens of each sequence.
        attention_width: heads times head dimension, which can differ from the hidden size (Qwen3-0.6B: 2,048 and
            1,024). If values have another dimension, the mean of heads times each of the two.
        active_parameters: parameters of all matrices that a token is multiplied by: the layers (only active experts)
            and the output projection, tied or not, but not the input embedding.
        num_layers: layers with attention.

    Returns:
        (N,) FLOPs.
    """
    return [6.0 * active_parameters * n + 6.0 * num_layers * attention_width * n * n for n in _as_list(lengths)]


def _level_bins(bins: list[list[int]], lengths: Sequence[int]) -> list[list[int]]:
    """Return the sequences in as many bins, but with less in the fullest one, if differencing finds such bins."""
    members = [i for batch in bins for i in batch]
    even = [[members[k] for k in part] for part in balance([lengths[i] for i in members], len(bins))]
    return min((bins, even), key=lambda each: max(sum(lengths[i] for i in batch) for batch in each))


def _even_out(partition: Partition, lengths: Sequence[int], costs: Sequence[float]) -> bool:
    """Bring every rank to the largest count, with as little change as possible. Return whether that succeeded."""
    most = max(len(batches) for batches in partition)
    for batches in partition:
        _split_bins(batches, lengths, most)
    for batches in partition:
        while len(batches) < most:
            moved = _take_cheapest(partition, costs)
            if moved is None:
                return False
            batches.append([moved])
    return True


def _take_cheapest(partition: Partition, costs: Sequence[float]) -> int | None:
    """Remove the cheapest sequence of the costliest rank from a micro-batch that has others too."""
    donors = [batches for batches in partition if any(len(members) > 1 for members in batches)]
    if not donors:
        return None
    donor = max(donors, key=lambda batches: sum(costs[i] for members in batches for i in members))
    _, slot, index = min((costs[i], k, i) for k, members in enumerate(donor) if len(members) > 1 for i in members)
    donor[slot].remove(index)
    return index


def _split_bins(bins: list[list[int]], lengths: Sequence[int], count: int) -> None:
    """Split the bin with the most tokens in two, until there are ``count`` bins or none has two sequences."""
    while len(bins) < count:
        splittable = [members for members in bins if len(members) > 1]
        if not splittable:
            return
        fullest = max(splittable, key=lambda members: sum(lengths[i] for i in members))
        bins.remove(fullest)
        halves = balance([lengths[i] for i in fullest], 2)
        bins.extend([fullest[k] for k in half] for half in halves)


def _even_partition(
    lengths: Sequence[int], max_tokens: int, num_ranks: int, costs: Sequence[float]
) -> Partition | None:
    """Return equally many micro-batches for every rank, as few as found; ``None`` if sequences are too few."""
    bins = first_fit_decreasing(lengths, max_tokens)
    rounds = -(-len(bins) // num_ranks)
    if rounds * num_ranks > len(lengths):
        return None
    _split_bins(bins, lengths, rounds * num_ranks)
    # Balanced largest-first differencing starts with one bin per rank (Michiels, Korst, Aarts, van Leeuwen 2003).
    weighed = sorted(((sum(float(costs[i]) for i in members), k) for k, members in enumerate(bins)), reverse=True)
    starts: list[list[_Part]] = [list(weighed[k : k + num_ranks]) for k in range(0, len(weighed), num_ranks)]
    return [[bins[k] for k in group] for group in _differencing(starts)]


def _as_list(values: Sequence[_Number] | Tensor) -> list[_Number]:
    """Return a tensor's entries as numbers, which are a hundred times faster to compare and add than 0-d tensors."""
    found = values.tolist() if isinstance(values, Tensor) else list(values)
    return found if isinstance(found, list) else [found]


def _check(lengths: Sequence[int], max_tokens: int) -> None:
    for index, length in enumerate(lengths):
        if length > max_tokens:
            raise ValueError(
                f"sequence {index} occupies {length} tokens, over the budget of {max_tokens}; raise max_tokens"
            )
        if length < 1:
            raise ValueError(f"sequence {index} has length {length}; every sequence needs at least one token")


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
        merged = [_join(a, b) for a, b in zip(first, reversed(second), strict=True)]
        merged.sort(key=lambda part: -part[0])
        heapq.heapreplace(heap, (*_priority(merged), serial, merged))
        serial += 1
    return [_flatten(members) for _, members in heap[0][-1]]


def _priority(parts: list[_Part]) -> tuple[float, float]:
    """Return negated spread and negated sum of a partial partition: the smallest is merged first."""
    return parts[-1][0] - parts[0][0], -sum(load for load, _ in parts)


def _join(first: _Part, second: _Part) -> _Part:
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
