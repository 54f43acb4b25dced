"""Bundles of sequences that share prefixes. Partitions put each bundle into one micro-batch."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Self

from slime_like.algorithms.packing.balance import balance
from slime_like.algorithms.packing.prefixes import Sharing, overlaps
from slime_like.trajectory import Trajectory

Costs = Callable[[Sequence[int]], Sequence[float]]
"""Function from lengths of sequences to the cost of each."""

_ROUGHLY_EVEN, _WORTHWHILE = 1.05, 0.98
"""Load of the heaviest replica, relative to the mean, up to which nothing is split; factor that a split must reach."""


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


def bundles(
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


def split_for(parts: int, given: Sequence[Bundle], costs: Costs) -> list[Bundle]:
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
