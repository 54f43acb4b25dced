"""Staleness bound of samples: how many groups may be issued, and how many ready groups a batch may take."""

import math
from bisect import bisect_left
from collections.abc import Iterable


class StalenessGate:
    """Arithmetic of ``rollout.max_staleness``. Holds only numbers. Not thread-safe.

    Before step n, the engines serve version n - 1. Until version v is served, ``v + max_staleness + 1`` batches may be
    issued, without dropped groups, and no more than the run has steps. So the groups of one version always fit into the
    batches that may train on them. A batch takes the oldest ready groups, but waits while the groups left behind could
    not all be trained in time. No group is dropped for its age.

    Args:
        oversample: groups issued per trained group; above 1, groups that a batch leaves behind are dropped.

    Attributes:
        version: weight version that the engines serve.
        formed: last step with a complete batch.
        taken: number of groups in the batch that is being formed.
    """

    def __init__(self, batch_size: int, max_staleness: int, steps: int, oversample: float = 1.0) -> None:
        self._batch_size = batch_size
        self._max_staleness = max_staleness
        self._steps = steps
        self._oversample = oversample
        self.version = self.formed = self.taken = 0

    @property
    def room(self) -> int:
        """Number of groups that the batch still needs."""
        return self._batch_size - self.taken

    def serve(self, version: int) -> None:
        """Record that the engines serve ``version``: training has completed that many steps."""
        self.version = version
        self.formed = max(self.formed, version)

    def may_issue(self, held: int) -> int:
        """Return how many more groups may be issued, while ``held`` are issued and not taken."""
        batches = min(self.version + self._max_staleness + 1, self._steps) - self.formed
        allowed = math.ceil(batches * self._batch_size * self._oversample)
        return max(0, allowed - held - self.taken)

    def may_take(self, ready: Iterable[int], under_way: Iterable[int]) -> int:
        """Return how many ready groups, oldest first, the batch may take: all it has room for, if the groups left
        behind can still be trained in time.

        Args:
            ready, under_way: versions of the ready groups, and of the groups that will be.
        """
        oldest_first = sorted(ready)
        most = min(self.room, len(oldest_first))
        if self._oversample > 1:
            return most
        later = list(under_way)
        # If n groups may be taken, so may n - 1: the remaining groups only move to earlier places.
        return bisect_left(range(1, most + 1), True, key=lambda n: self._is_late([*oldest_first[n:], *later], n))

    def _is_late(self, left: list[int], count: int) -> bool:
        """Return whether a version in ``left`` is trained too late after ``count`` more groups."""
        first = self.taken + count
        steps = (self.formed + 1 + place // self._batch_size for place in range(first, first + len(left)))
        return any(step > version + self._max_staleness + 1 for step, version in zip(steps, sorted(left), strict=True))

    def take(self, count: int) -> None:
        """Add ``count`` groups to the batch, at most ``room``. A full batch is complete."""
        self.taken += count
        if self.taken == self._batch_size:
            self.formed, self.taken = self.formed + 1, 0
