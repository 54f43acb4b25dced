"""Distribution of sequences over data-parallel ranks and token-bounded micro-batches. Nothing is dropped."""

from collections.abc import Sequence
from typing import TypeVar

from torch import Tensor

from slime_like.algorithms.packing.balance import balance, share_out
from slime_like.algorithms.packing.bins import first_fit_decreasing, pack_into

Partition = list[list[list[int]]]
_Number = TypeVar("_Number", int, float)


def partition_by_tokens(
    lengths: Sequence[int] | Tensor, max_tokens: int, num_ranks: int, *, costs: Sequence[float] | Tensor | None = None
) -> Partition:
    """Choose a rank and a micro-batch for every sequence.

    Karmarkar-Karp differencing balances ranks. First-fit-decreasing then packs each rank's sequences into few
    micro-batches, and differencing spreads them evenly, since the largest micro-batch decides the memory of a step.

    All ranks get equally many micro-batches. Ranks with fewer split theirs; a rank with too few sequences for that gets
    the cheapest of the others. If there are too few sequences altogether, micro-batches are packed first and then
    distributed. If equal counts don't exist (three sequences of the budget's size for two ranks), some ranks have
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
    return [sorted(sorted(members) for members in _levelled(batches, lengths)) for batches in partition]


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


def _levelled(bins: list[list[int]], lengths: Sequence[int]) -> list[list[int]]:
    """Return the sequences in as many bins, but with less in the fullest one, if differencing finds such bins."""
    members = [i for batch in bins for i in batch]
    even = [[members[k] for k in part] for part in balance([lengths[i] for i in members], len(bins))]
    return min((bins, even), key=lambda each: max(sum(lengths[i] for i in batch) for batch in each))


# -------------------------------------------------------------------------------------------------------- equal counts
def _even_out(partition: Partition, lengths: Sequence[int], costs: Sequence[float]) -> bool:
    """Bring every rank to the largest count, with as little change as possible. Return whether that succeeded."""
    most = max(len(batches) for batches in partition)
    for batches in partition:
        _split_up(batches, lengths, most)
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


def _split_up(bins: list[list[int]], lengths: Sequence[int], count: int) -> None:
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
        rounds = len(lengths) // num_ranks
        fewer = pack_into(lengths, max_tokens, rounds * num_ranks)
        if fewer is None:
            return None
        bins = fewer
    _split_up(bins, lengths, rounds * num_ranks)
    return share_out(bins, num_ranks, costs)


# -------------------------------------------------------------------------------------------------------------- checks
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
