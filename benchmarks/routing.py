"""The routing core by itself: ``python -m benchmarks.routing``.

64 workers with 64 requests each on average, answered in the order they were sent: decisions per second, and how far the
busiest worker's outstanding tokens are above the mean. A request is charged with its prompt and with as many tokens as
it may sample. Two loads: as a run sends them (every request may sample the same number of tokens, prompts are
lognormal), and requests that are lognormal altogether, where a single one may outweigh a tenth of a worker's load.
"""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from slime_like.orchestration.worker_registry import WorkerRegistry

WORKERS, REQUESTS, IN_FLIGHT = 64, 50_000, 64 * 64
GOAL_PER_S, GOAL_IMBALANCE = 5_000, 0.10


@dataclass(frozen=True)
class Figures:
    """``imbalance``: busiest worker over the mean, less 1, at its worst; ``largest``: largest request over the mean."""

    per_s: float
    imbalance: float
    largest: float


def route(sizes: Sequence[int]) -> Figures:
    """Send requests of these charges."""
    registry = WorkerRegistry(capacity=256)
    for worker in range(WORKERS):
        registry.join(worker)
    running: deque[tuple[int, int]] = deque()
    imbalances: list[float] = []
    spent = mean = 0.0
    for index, size in enumerate(sizes):
        started = time.perf_counter()
        worker = registry.acquire(size)
        assert worker is not None
        running.append((worker, size))
        if len(running) > IN_FLIGHT:
            registry.release(*running.popleft())
        spent += time.perf_counter() - started
        if len(running) == IN_FLIGHT and index % 100 == 0:
            loads = [registry.outstanding_tokens(worker) for worker in registry.workers]
            mean = sum(loads) / len(loads)
            imbalances.append(max(loads) / mean - 1)
    return Figures(len(sizes) / spent, max(imbalances), max(sizes) / mean)


def main() -> None:
    rng = random.Random(0)
    as_in_a_run = [int(rng.lognormvariate(5.5, 0.8)) + 1 + 8 * 1024 for _ in range(REQUESTS)]
    lognormal = [int(rng.lognormvariate(6.0, 0.8)) + 1 for _ in range(REQUESTS)]
    found = route(as_in_a_run)
    for what, value, met in (
        (f"decisions a second (goal {GOAL_PER_S:,})", f"{found.per_s:,.0f}", found.per_s >= GOAL_PER_S),
        (f"busiest above the mean (goal {GOAL_IMBALANCE:.0%})", f"{found.imbalance:.1%}", found.imbalance <= 0.10),
    ):
        print(f"{'met    ' if met else 'NOT MET'}  requests as in a run, {what}: {value}")
    other = route(lognormal)
    print(
        f"         lognormal requests, {other.per_s:,.0f} decisions a second, busiest above the mean: "
        f"{other.imbalance:.1%}; the largest request alone is {other.largest:.1%} of a worker's mean load"
    )


if __name__ == "__main__":
    main()
