"""WindowStream: the micro-batches of a step while its groups are still arriving."""

from collections.abc import Sequence

from slime_like.orchestration.trainer.batcher import ExperienceBatcher, Window
from slime_like.trajectory import ScoredTrajectory


class WindowStream:
    """The windows of one optimizer step, each given out as soon as it is full.

    Attributes:
        trajectories: everything that has been added, in order of arrival.
        packed_tokens: tokens of what has been given out, padding and fillers included.
    """

    def __init__(self, batcher: ExperienceBatcher) -> None:
        self._batcher = batcher
        self._waiting: list[ScoredTrajectory] = []
        self._has_given = False
        self.trajectories: list[ScoredTrajectory] = []
        self.packed_tokens = 0

    def add(self, groups: Sequence[ScoredTrajectory]) -> Window | None:
        """Take in whole groups; the window that is full with them, if one is.

        Raises:
            DataError: a sequence is over the token budget.
        """
        self._batcher.weigh(groups)
        self.trajectories += groups
        window, self._waiting = self._batcher.pack_full([*self._waiting, *groups])
        return self._given(window) if window[0] else None

    def finish(self) -> tuple[Window, float]:
        """(the last window, the denominator of the whole step). Never empty: what arrived last is never full.

        Raises:
            DataError: there are fewer sequences than data-parallel replicas.
            ValueError: nothing in the step carries loss.
        """
        window = self._batcher.pack_all(self._waiting, replicas_served=self._has_given)
        return self._given(window), self._batcher.denominator(self.trajectories)

    def _given(self, window: Window) -> Window:
        self._has_given = True
        self.packed_tokens += sum(pack.packed_seq_len for replica in window for pack in replica)
        return window
