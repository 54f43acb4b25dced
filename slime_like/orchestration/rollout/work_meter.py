"""WorkMeter: seconds and tokens of the reference workers."""

import threading
from collections.abc import Sequence
from dataclasses import dataclass

from slime_like.trajectory import UnscoredTrajectory


@dataclass(frozen=True, slots=True)
class ReferenceWork:
    """Work that was done in a period.

    Attributes:
        busy_s: seconds at work.
        response_tokens, total_tokens: tokens that were scored.
    """

    busy_s: float = 0.0
    response_tokens: int = 0
    total_tokens: int = 0


class WorkMeter:
    """Adds up the work of several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._work = ReferenceWork()

    def add(self, busy_s: float, trajectories: Sequence[UnscoredTrajectory]) -> None:
        """Count the trajectories that one worker has scored in ``busy_s``."""
        with self._lock:
            self._work = ReferenceWork(
                self._work.busy_s + busy_s,
                self._work.response_tokens + sum(trajectory.response_len for trajectory in trajectories),
                self._work.total_tokens + sum(trajectory.total_len for trajectory in trajectories),
            )

    def take(self) -> ReferenceWork:
        """Return the work since the last call, and reset the counters."""
        with self._lock:
            work, self._work = self._work, ReferenceWork()
        return work
