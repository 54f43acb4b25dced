"""Choice of a worker for the next request: fewest outstanding tokens first. Needs no Ray."""

from dataclasses import dataclass


@dataclass(slots=True)
class _Worker:
    outstanding_tokens: int = 0
    outstanding_requests: int = 0


class LeastLoaded:
    """Routing state of one pool of workers.

    Args:
        capacity: limit on requests that a worker holds at the same time.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._workers: dict[int, _Worker] = {}

    def join(self, worker: int) -> None:
        """Add a worker with nothing outstanding."""
        self._workers[worker] = _Worker()

    def leave(self, worker: int) -> None:
        """Remove a worker. The caller must issue its requests again."""
        del self._workers[worker]

    @property
    def workers(self) -> list[int]:
        return list(self._workers)

    def outstanding_tokens(self, worker: int) -> int:
        return self._workers[worker].outstanding_tokens

    def acquire(self, tokens: int) -> int | None:
        """Charge ``tokens`` to the least loaded worker with room, and return it; ``None`` if all are full."""
        free = [index for index, worker in self._workers.items() if worker.outstanding_requests < self._capacity]
        if not free:
            return None
        chosen = min(free, key=lambda index: (self._workers[index].outstanding_tokens, index))
        self._workers[chosen].outstanding_tokens += tokens
        self._workers[chosen].outstanding_requests += 1
        return chosen

    def release(self, worker: int, tokens: int) -> None:
        """Record that a request of ``tokens`` ended. Workers that have left are ignored."""
        if worker in self._workers:
            self._workers[worker].outstanding_tokens -= tokens
            self._workers[worker].outstanding_requests -= 1
