"""Time of a run: seconds of a step by phase, and waits, e.g. for engines that load or groups that are sampled."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from slime_like.system.spans import add_span
from slime_like.system.words import pluralize

_TRACK = "driver/steps"

PHASES = ("wait", "generate", "reward", "score", "critic", "train", "sync")
ORCHESTRATION = "orchestration"
"""Time outside all phases: batching, bookkeeping, everything between the phases."""


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
            ended = self._now_ns()
            self._spent_ns[name] += ended - started
            add_span(_TRACK, name, started, ended)
            self._open = None

    def finish(self, name: str = "step") -> dict[str, float]:
        """Return the seconds of every phase and of ``ORCHESTRATION`` since the start, or since the last ``finish``.

        They add up to the step's time, a span ``name`` of the timeline. The clock restarts.
        """
        now, spent = self._now_ns(), self._spent_ns
        add_span(_TRACK, name, self._started_ns, now)
        spent[ORCHESTRATION] = now - self._started_ns - sum(spent.values())
        self._restart(now)
        return {name: ns / 1e9 for name, ns in spent.items()}

    def _restart(self, now_ns: int) -> None:
        self._started_ns = now_ns
        self._spent_ns = dict.fromkeys(PHASES, 0)


def ignore_answers(waiting: Sequence[str] | int) -> None:
    """Do nothing. The default for callers that show no progress."""


@dataclass(slots=True)
class Waiting:
    """One wait and its description. One thread changes it, another may read it.

    Attributes:
        title: the awaited work ("loading engines").
        total: number of awaited items; 0 counts nothing.
        noun: name of an item, in the singular: "3 of 16 groups". Without it: "1 of 2 ready".
        count: returns the finished items; without it, ``on_waiting`` or ``reach`` records them.
    """

    title: str
    total: int = 0
    noun: str = ""
    count: Callable[[], int] | None = None
    done: int = 0
    names: Sequence[str] = ()

    def on_waiting(self, names: Sequence[str]) -> None:
        self.names = tuple(names)
        self.done = self.total - len(self.names)

    def reach(self, done: int) -> None:
        self.done = done

    def under_way(self, seconds: float) -> str:
        done = self.done if self.count is None else self.count()
        number = f"{done} of {self._all()}, " if self.total else ""
        others = f" and {len(self.names) - 1} more" if len(self.names) > 1 else ""
        names = f", waiting for {self.names[0]}{others}" if self.names else ""
        return f"{self.title}: {number}{seconds:.0f} s{names}"

    def finished(self, seconds: float) -> str:
        number = f"{self._all()} in " if self.total else ""
        return f"{self.title}: {number}{seconds:.1f} s"

    def _all(self) -> str:
        return pluralize(self.total, self.noun) if self.noun else f"{self.total} ready"
