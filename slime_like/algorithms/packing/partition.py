"""Distributing sequences over data-parallel ranks and token-bounded micro-batches. Nothing is dropped."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from torch import Tensor

from slime_like.algorithms.packing.balance import balance, share_out
from slime_like.algorithms.packing.bins import first_fit_decreasing, pack_into

Partition = list[list[list[int]]]
_Number = TypeVar("_Number", int, float)


def partition_by_tokens(
    lengths: Sequence[int] | Tensor,
    max_tokens: int,
    num_ranks: int,
    *,
    costs: Sequence[float] | Tensor | None = None,
) -> Partition:
    """Choose a rank and a micro-batch for every sequence.

    Ranks are balanced by Karmarkar-Karp differencing, then each rank's sequences are laid into as few micro-batches as
    first-fit-decreasing finds, and spread evenly over so many: the largest decides how much memory a step takes, and
    the smallest still costs what every micro-batch does. For equal counts the ranks with fewer micro-batches split
    theirs; one with too few sequences for that is given the cheapest of the others. Where there are too few sequences
    altogether, all are laid into micro-batches first, and those are shared out evenly. Where no equal counts exist
    (three sequences of the budget's size for two ranks), a rank has fewer: fill it up with ``zero_weight_pack``.

    Args:
        lengths: (N,) tokens each sequence occupies, layout padding counted (``padded_length``).
        max_tokens: budget of one micro-batch.
        num_ranks: data-parallel ranks; each gets at least one sequence.
        costs: (N,) what to balance ranks by, e.g. ``training_flops``; none means tokens.

    Returns:
        ``[rank][micro_batch]`` lists of indices into ``lengths``, ascending; every index exactly once.

    Raises:
        ValueError: a sequence over the budget (its index is named) or without tokens, or fewer sequences than
            ranks.

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


@dataclass(frozen=True, slots=True)
class StreamedPartition:
    """``partition``: full micro-batches, the same number on every rank. ``spare``: indices carried over."""

    partition: Partition
    spare: list[int]


def partition_full_batches(lengths: Sequence[int] | Tensor, max_tokens: int, num_ranks: int) -> StreamedPartition:
    """Partition a growing list of sequences: whole rounds of full micro-batches, which can be sent already.

    Micro-batches are filled in order of arrival. One is full when the next sequence no longer fits; full ones are given
    out in rounds of one per rank, and everything else is spare and belongs in front of the next call's sequences.

    Args:
        lengths: tokens each waiting sequence occupies, in order of arrival.
        max_tokens: budget of one micro-batch.
        num_ranks: data-parallel ranks.

    Returns:
        Indices into ``lengths``: the full micro-batches of every rank, and the spare ones.

    Raises:
        ValueError: a sequence over the budget (its index is named) or without tokens.
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
    spare = [i for members in full[rounds * num_ranks :] for i in members] + current
    return StreamedPartition([sent[rank::num_ranks] for rank in range(num_ranks)], spare)


def training_flops(
    lengths: Sequence[int] | Tensor, attention_width: int, active_parameters: int, num_layers: int
) -> list[float]:
    """Forward and backward FLOPs per sequence, for balancing by cost: attention grows with the square of the length.

    ``6 * parameters * n`` for the matrix products, ``6 * layers * width * n^2`` for causal attention (half of the
    ``12 * layers * width * n^2`` of full attention; Kaplan et al., arXiv:2001.08361, table 1, and PaLM,
    arXiv:2204.02311, appendix B).

    Args:
        lengths: (N,) tokens of each sequence.
        attention_width: heads times head dimension, which need not be the model's hidden size (Qwen3-0.6B: 2,048 and
            1,024); the mean of that and heads times the values' dimension where the two differ.
        active_parameters: of the matrices that a token is multiplied by: layers, of a mixture of experts the active
            ones, and the output projection, tied or not; the input embedding is none.
        num_layers: with attention.

    Returns:
        (N,) FLOPs.
    """
    return [6.0 * active_parameters * n + 6.0 * num_layers * attention_width * n * n for n in _as_list(lengths)]


def _levelled(bins: list[list[int]], lengths: Sequence[int]) -> list[list[int]]:
    """The same sequences in as many bins, the fullest of which holds less; as they are where none such is found."""
    members = [i for batch in bins for i in batch]
    even = [[members[k] for k in part] for part in balance([lengths[i] for i in members], len(bins))]
    return min((bins, even), key=lambda each: max(sum(lengths[i] for i in batch) for batch in each))


# -------------------------------------------------------------------------------------------------------- equal counts
def _even_out(partition: Partition, lengths: Sequence[int], costs: Sequence[float]) -> bool:
    """Bring every rank to the largest count of any, with as little change as possible; whether all got there."""
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
    """Take a sequence out of a micro-batch that holds others too: the cheapest of the rank that bears most."""
    donors = [batches for batches in partition if any(len(members) > 1 for members in batches)]
    if not donors:
        return None
    donor = max(donors, key=lambda batches: sum(costs[i] for members in batches for i in members))
    _, slot, index = min((costs[i], k, i) for k, members in enumerate(donor) if len(members) > 1 for i in members)
    donor[slot].remove(index)
    return index


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


def _even_partition(
    lengths: Sequence[int], max_tokens: int, num_ranks: int, costs: Sequence[float]
) -> Partition | None:
    """The same number of micro-batches on every rank, as few as can be found; ``None`` if that needs more sequences."""
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
    """A tensor's entries as numbers: 0-d tensors would be compared and added a hundred times slower."""
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
