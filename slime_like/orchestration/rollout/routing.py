"""Choice of a worker for the next request: fewest outstanding tokens first. Needs no Ray."""

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

Worker = TypeVar("Worker", bound=Hashable)


@dataclass(slots=True)
class _Load:
    tokens: int = 0
    requests: int = 0


class LeastLoaded(Generic[Worker]):
    """Routing state of one pool of workers.

    Args:
        capacity: limit on requests that a worker holds at the same time.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._loads: dict[Worker, _Load] = {}  # in order of joining

    def join(self, worker: Worker) -> None:
        self._loads[worker] = _Load()

    def leave(self, worker: Worker) -> None:
        """Remove a worker. The caller must issue its requests again."""
        del self._loads[worker]

    @property
    def workers(self) -> list[Worker]:
        return list(self._loads)

    def outstanding_tokens(self, worker: Worker) -> int:
        return self._loads[worker].tokens

    def acquire(self, tokens: int) -> Worker | None:
        """Charge ``tokens`` to the least loaded worker with room, and return it; ``None`` if all are full."""
        free = [worker for worker, load in self._loads.items() if load.requests < self._capacity]
        if not free:
            return None
        chosen = min(free, key=self.outstanding_tokens)
        self._loads[chosen].tokens += tokens
        self._loads[chosen].requests += 1
        return chosen

    def release(self, worker: Worker, tokens: int) -> None:
        """Record that a request of ``tokens`` ended. Workers that have left are ignored."""
        if worker in self._loads:
            self._loads[worker].tokens -= tokens
            self._loads[worker].requests -= 1
