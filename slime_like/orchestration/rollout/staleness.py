"""The bound on staleness of samples: how many groups may be issued, and how many of the ready ones a batch may take."""

import math
from bisect import bisect_left
from collections.abc import Iterable


class StalenessGate:
    """The arithmetic of ``rollout.max_staleness``; holds numbers only. Not thread-safe.

    Before step n, the engines serve version n - 1. Until version v is served, ``v + max_staleness + 1`` batches may
    have been issued, dropped groups not counted, but no more than the run has steps. So the groups of any one version
    are never more than still fit into the batches that may train on them. A batch takes the oldest that are ready, but
    waits as long as what it would leave behind could not all be trained in time: no group is dropped for its age.

    Args:
        oversample: groups issued per group trained; above 1, what a batch leaves behind is dropped.

    Attributes:
        version: weights that the engines serve.
        formed: last step whose batch is complete.
        taken: groups of the batch that is being formed.
    """

    def __init__(self, batch_size: int, max_staleness: int, steps: int, oversample: float = 1.0) -> None:
        self._batch_size = batch_size
        self._max_staleness = max_staleness
        self._steps = steps
        self._oversample = oversample
        self.version = self.formed = self.taken = 0

    @property
    def room(self) -> int:
        """Groups that the batch still needs."""
        return self._batch_size - self.taken

    def serve(self, version: int) -> None:
        """Record that the engines serve ``version``: training has made that many steps."""
        self.version = version
        self.formed = max(self.formed, version)

    def may_issue(self, held: int) -> int:
        """Number of further groups that may be issued, while ``held`` are issued and not taken."""
        batches = min(self.version + self._max_staleness + 1, self._steps) - self.formed
        allowed = math.ceil(batches * self._batch_size * self._oversample)
        return max(0, allowed - held - self.taken)

    def may_take(self, ready: Iterable[int], under_way: Iterable[int]) -> int:
        """Number of ready groups, oldest first, that the batch may take: the most that it has room for, as long as the
        groups left behind can still be trained in time.

        Args:
            ready, under_way: the version of each group that is ready, and of each that will be.
        """
        oldest_first = sorted(ready)
        most = min(self.room, len(oldest_first))
        if self._oversample > 1:
            return most
        later = list(under_way)
        # If n groups may be taken, so may n - 1: what stays behind moves to earlier places, if at all.
        return bisect_left(range(1, most + 1), True, key=lambda n: self._is_late([*oldest_first[n:], *later], n))

    def _is_late(self, left: list[int], count: int) -> bool:
        """Return whether a version in ``left`` is trained too late after ``count`` more groups."""
        first = self.taken + count
        steps = (self.formed + 1 + place // self._batch_size for place in range(first, first + len(left)))
        return any(step > version + self._max_staleness + 1 for step, version in zip(steps, sorted(left), strict=True))

    def take(self, count: int) -> None:
        """Add ``count`` groups to the batch, at most ``room``; a full batch is complete."""
        self.taken += count
        if self.taken == self._batch_size:
            self.formed, self.taken = self.formed + 1, 0
