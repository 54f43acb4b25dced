"""Prefixes that sequences of a group share: a pack as a tree of segments, each computed once, and bundles of sequences.

A pack always has whole sequences. If they share prefixes, three more tensors define the tokens to compute: segments,
end to end, each after the one that it continues and before all that continue it. A token's hidden state doesn't depend
on later tokens, so all sequences can read the same one, and their gradients add up. Partitions put each bundle of
sequences that share prefixes into one micro-batch.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Literal, NamedTuple, Self, get_args

import numpy as np
import torch
from torch import Tensor

from slime_like.algorithms.packing.fields import Array, PackLengths
from slime_like.algorithms.packing.partition import balance
from slime_like.trajectory import PackedTrajectory, Trajectory

Sharing = Literal["prompts", "tree"]

_WORTH = 32
"""Least number of common tokens beyond the end of a prompt or a sequence to share, instead of only up to that end."""

_READERS = 5
"""Tokens after a prefix, per token of it, above which merging attention costs more than computing the prefix."""

Costs = Callable[[Sequence[int]], Sequence[float]]
"""Function from lengths of sequences to the cost of each."""

_ROUGHLY_EVEN, _WORTHWHILE = 1.05, 0.98
"""Load of the heaviest replica, relative to the mean, up to which nothing is split; factor that a split must reach."""


class TreeSegment(NamedTuple):
    """Tokens ``[start, end)`` of the sequence ``row``, and of all others that share them."""

    parent: int
    row: int
    start: int
    end: int


def overlaps(sequences: Sequence[Trajectory], sharing: Sharing | None) -> tuple[list[int], list[int]]:
    """Return an order in which each sequence shares most with the one before it, and the tokens that each shares.

    Args:
        sequences: any sequences; only those of one group share.
        sharing: "prompts" for equal whole prompts, "tree" for any common beginning, or ``None`` for nothing.

    Raises:
        ValueError: an unknown name.
    """
    if sharing not in (None, *get_args(Sharing)):
        raise ValueError(f"sharing={sharing!r} is unknown; use 'prompts', 'tree' or None")
    order = list(range(len(sequences)))
    if sharing is None:
        return order, [0] * len(order)
    parts = [(one.prompt_tokens, one.response_tokens)[: 1 if sharing == "prompts" else 2] for one in sequences]
    # Big-endian, so that the bytes of tokens sort like the numbers.
    tokens = [np.concatenate([part.numpy() for part in each]).astype(">i8") for each in parts]
    keys = [(sequence.group_id, each.tobytes()) for sequence, each in zip(sequences, tokens, strict=True)]
    # A fixed order, so that a part of the sequences shares no less than it does among all of them.
    order.sort(key=lambda index: (keys[index], sequences[index].total_len, sequences[index].sequence_id))
    shared = [0]
    for before, after in pairwise(order):
        if keys[before][0] != keys[after][0]:
            common = 0
        elif sharing == "prompts":
            common = len(tokens[after]) if keys[before] == keys[after] else 0
        else:
            common = _common_tokens(sequences[before], sequences[after], tokens[before], tokens[after])
        shared.append(common if is_worth_sharing(common, sequences[after].total_len - common) else 0)
    return order, shared


def _common_tokens(one: Trajectory, other: Trajectory, ids: Array, other_ids: Array) -> int:
    """Return where to part two sequences: at a nearby end of one of them or a prompt, if any."""
    shorter = min(len(ids), len(other_ids))
    differ = ids[:shorter] != other_ids[:shorter]
    common = int(differ.argmax()) if differ.any() else shorter
    natural = max((end for end in (one.prompt_len, one.total_len, other.prompt_len) if end <= common), default=0)
    return common if common - natural >= _WORTH else natural


def is_worth_sharing(prefix: float, rest: float) -> bool:
    """Return whether a sequence with ``rest`` more tokens costs less if it shares the prefix."""
    return _READERS * prefix >= rest


def segments_of(lengths: Sequence[int], shared: Sequence[int]) -> tuple[list[TreeSegment], list[list[int]]]:
    """Return segments of sequences in the order of ``overlaps``, parents first, and each sequence's segments.

    A new segment starts wherever sequences part. A sequence that others continue ends with a shared segment.
    """
    segments: list[TreeSegment] = []
    paths: list[list[int]] = [[] for _ in lengths]
    waiting = [(0, len(lengths), 0, -1)]
    while waiting:  # the last one first, so all that continues a segment follows it directly
        first, last, start, parent = waiting.pop()
        row, end, parts = _find_fork(lengths, shared, first, last)
        if end > start:
            for path in paths[first:last]:
                path.append(len(segments))
            segments.append(TreeSegment(parent, row, start, end))
            parent = len(segments) - 1
        waiting += [(*part, end, parent) for part in reversed(parts)]
    return segments, paths


def _find_fork(
    lengths: Sequence[int], shared: Sequence[int], first: int, last: int
) -> tuple[int, int, list[tuple[int, int]]]:
    """Return a row of ``[first, last)`` with their common prefix, its length, and the ranges of rows that continue."""
    while last - first > 1:
        common = min(shared[first + 1 : last])
        cuts = [first, *(row for row in range(first + 1, last) if shared[row] == common), last]
        parts = [(a, b) for a, b in pairwise(cuts) if b - a > 1 or lengths[a] > common]
        if len(parts) != 1:
            return first, common, parts
        ((first, last),) = parts
    return first, lengths[first], []


def segment_fields(sequences: Sequence[Trajectory], lengths: PackLengths, sharing: Sharing | None) -> dict[str, Tensor]:
    """Return the fields ``segment_...`` of a pack; none if nothing is shared."""
    order, shared = overlaps(sequences, sharing)
    if not any(shared):
        return {}
    segments, paths = segments_of([int(lengths.total[row]) for row in order], shared)
    sizes = [segment.end - segment.start for segment in segments]
    begins = list(accumulate(sizes, initial=0))
    places = np.empty(lengths.actual, np.int64)
    for row, path in zip(order, paths, strict=True):
        sequence = places[lengths.starts[row] : lengths.ends[row]]
        for number in path:
            part = sequence[segments[number].start : segments[number].end]
            part[:] = np.arange(begins[number], begins[number] + len(part))
    parents = [segment.parent for segment in segments]
    return {
        "segment_parents": torch.tensor(parents),
        "segment_lengths": torch.tensor(sizes),
        "segment_places": torch.from_numpy(places),
    }


def segment_sources(packed: PackedTrajectory) -> Tensor:
    """Return (sum of the segments,) int64: the first token of the pack that each segment token represents."""
    assert packed.segment_places is not None and packed.segment_lengths is not None
    tokens = torch.arange(packed.actual_total_tokens, device=packed.segment_places.device)
    sources = tokens.new_full((int(packed.segment_lengths.sum()),), packed.actual_total_tokens)
    return sources.scatter_reduce(0, packed.segment_places, tokens, "amin")


def tree_of_tokens(packed: PackedTrajectory) -> tuple[Tensor, Tensor]:
    """Return the tree that each token of a pack with shared prefixes belongs to, and the sizes of all trees."""
    parents, lengths, places = packed.segment_parents, packed.segment_lengths, packed.segment_places
    assert parents is not None and lengths is not None and places is not None
    trees = (parents < 0).cumsum(0) - 1
    sizes = lengths.new_zeros(int(trees[-1]) + 1).index_add(0, trees, lengths)
    return trees.repeat_interleave(lengths)[places], sizes


@dataclass(frozen=True, slots=True)
class Bundle:
    """Sequences of one micro-batch.

    A prefix costs as much as a sequence that ends with it. So a bundle costs, in tokens or FLOPs, as much as its
    sequences, minus the cost of their overlaps.

    Attributes:
        members: indices of sequences, ordered so that each shares most with the one before.
        lengths: tokens of each sequence.
        shared: tokens that each shares with the one before; 0 for the first.
    """

    members: list[int]
    lengths: list[int]
    shared: list[int]

    @property
    def tokens(self) -> int:
        return sum(self.lengths) - sum(self.shared)

    def cost(self, costs: Costs) -> float:
        return sum(costs(self.lengths)) - sum(costs([shared for shared in self.shared if shared]))

    def halves(self) -> tuple[Self, Self]:
        """Return two bundles of most nearly equal size. Both compute the prefix that they share."""
        sizes = accumulate(length - shared for length, shared in zip(self.lengths, self.shared, strict=True))
        firsts, total = list(sizes), self.tokens
        cut = min(range(1, len(firsts)), key=lambda at: max(firsts[at - 1], total - firsts[at - 1] + self.shared[at]))
        return self._part(0, cut), self._part(cut, len(self.members))

    def _part(self, start: int, end: int) -> Self:
        shared = [0, *self.shared[start + 1 : end]]
        return type(self)(self.members[start:end], self.lengths[start:end], shared)


def make_bundles(
    sequences: Sequence[Trajectory], lengths: Sequence[int], sharing: Sharing | None, budget: int
) -> list[Bundle]:
    """Bundle all sequences, at most ``budget`` tokens each, in the order of their first members.

    Args:
        lengths: tokens of each sequence, at most the budget; with padding only if nothing is shared.
    """
    order, shared = overlaps(sequences, sharing)
    found: list[Bundle] = []
    used = 0
    for index, overlap in zip(order, shared, strict=True):
        if found and overlap and used + lengths[index] - overlap <= budget:
            found[-1].members.append(index)
            found[-1].lengths.append(lengths[index])
            found[-1].shared.append(overlap)
            used += lengths[index] - overlap
        else:
            found.append(Bundle([index], [lengths[index]], [0]))
            used = lengths[index]
    return sorted(found, key=lambda bundle: min(bundle.members))


def split_bundles(parts: int, given: Sequence[Bundle], costs: Costs) -> list[Bundle]:
    """Split bundles for ``parts`` replicas if there are too few bundles, or one replica would have too much to do."""
    found = list(given)
    while len(found) < parts and _split_costliest(found, range(len(found)), costs):
        pass
    if all(len(bundle.members) == 1 for bundle in found) or len(found) < parts:
        return found
    heaviest, share = _heaviest(found, parts, costs)
    while heaviest * parts > _ROUGHLY_EVEN * sum(bundle.cost(costs) for bundle in found):
        tried = list(found)
        if not _split_costliest(tried, share, costs):
            break
        lighter, share = _heaviest(tried, parts, costs)
        if lighter > _WORTHWHILE * heaviest:
            break
        found, heaviest = tried, lighter
    return found


def _split_costliest(found: list[Bundle], among: Sequence[int], costs: Costs) -> bool:
    """Replace the costliest bundle with several members by its halves; return False if there is none."""
    several = [index for index in among if len(found[index].members) > 1]
    if several:
        costliest = max(several, key=lambda index: found[index].cost(costs))
        found[costliest : costliest + 1] = found[costliest].halves()
    return bool(several)


def _heaviest(found: Sequence[Bundle], parts: int, costs: Costs) -> tuple[float, list[int]]:
    each = [bundle.cost(costs) for bundle in found]
    shares = ((sum(each[i] for i in share), share) for share in balance(each, parts))
    return max(shares, key=lambda share: share[0])
