"""Sequences that share prefixes, in bundles that lie in one micro-batch each: what partitions then distribute."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Self

from slime_like.algorithms.packing.balance import balance
from slime_like.algorithms.packing.prefixes import Sharing, overlaps
from slime_like.trajectory import Trajectory

Costs = Callable[[Sequence[int]], Sequence[float]]
"""What sequences of these lengths cost, each by itself."""

_ROUGHLY_EVEN, _WORTHWHILE = 1.05, 0.98
"""Heaviest replica's share of the mean at which nothing is split; what a split must bring it down to."""


@dataclass(frozen=True, slots=True)
class Bundle:
    """Sequences of one micro-batch.

    A prefix costs what a sequence that ends with it does, so that a bundle costs its sequences less their overlaps,
    whether costs are tokens or FLOPs.

    Attributes:
        members: indices, in an order in which each shares most with the one before.
        lengths: tokens of each.
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
        """Two bundles of most nearly equal size; what both share is computed in each."""
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
    """All sequences in bundles of at most ``budget`` tokens, in the order of their first members.

    Args:
        lengths: tokens that each takes, none above the budget; with padding only where nothing is shared.
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
    """Bundles that spread over ``parts`` replicas: split where there are too few, or one replica had too much.

    Nothing is split where the sequences share nothing.
    """
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
    """Replace the costliest bundle that has several members by its halves; False if none has."""
    several = [index for index in among if len(found[index].members) > 1]
    if several:
        costliest = max(several, key=lambda index: found[index].cost(costs))
        found[costliest : costliest + 1] = found[costliest].halves()
    return bool(several)


def _heaviest(found: Sequence[Bundle], parts: int, costs: Costs) -> tuple[float, list[int]]:
    """Cost of the replica that bears most, and its bundles."""
    each = [bundle.cost(costs) for bundle in found]
    shares = ((sum(each[i] for i in share), share) for share in balance(each, parts))
    return max(shares, key=lambda share: share[0])
