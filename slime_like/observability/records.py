"""Wall time of a training step by phase."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

PHASES = ("wait", "generate", "reward", "score", "critic", "train", "sync")


@dataclass(frozen=True, slots=True)
class PhaseTimes:
    """Wall time of one step, in seconds; ``sum(seconds.values()) + orchestration_s`` is ``step_s``.

    Attributes:
        seconds: time in each of ``PHASES``, every phase present.
        orchestration_s: time outside all phases: batching, bookkeeping, everything between the phases.
    """

    step_s: float
    seconds: dict[str, float]
    orchestration_s: float


class PhaseClock:
    """Stopwatch of one training loop. Runs from construction, or from the last ``finish``. Not thread-safe.

    Counts whole nanoseconds, so the parts add up to the step and none is negative.
    """

    def __init__(self, now_ns: Callable[[], int] = time.perf_counter_ns) -> None:
        self._now_ns = now_ns
        self._open: str | None = None
        self._restart(now_ns())

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the time inside the block to ``name``, one of ``PHASES``, even if it raises. Phases do not nest."""
        if self._open is not None:  # its time would be counted twice
            raise RuntimeError(f"phase {name!r} begins inside phase {self._open!r}; end that one first")
        self._open = name
        started = self._now_ns()
        try:
            yield
        finally:
            self._spent_ns[name] += self._now_ns() - started
            self._open = None

    def finish(self) -> PhaseTimes:
        """Return the times since the start, or since the last ``finish``, and restart the clock."""
        now = self._now_ns()
        step_ns = now - self._started_ns
        spent = self._spent_ns
        self._restart(now)
        return PhaseTimes(
            step_s=step_ns / 1e9,
            seconds={name: ns / 1e9 for name, ns in spent.items()},
            orchestration_s=(step_ns - sum(spent.values())) / 1e9,
        )

    def _restart(self, now_ns: int) -> None:
        self._started_ns = now_ns
        self._spent_ns = dict.fromkeys(PHASES, 0)
