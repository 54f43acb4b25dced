"""Measure the routing core by itself: ``python -m benchmarks.routing``.

64 workers have 64 requests each on average, answered in the order in which they were sent. Measured are decisions per
second, and how far the busiest worker's outstanding tokens exceed the mean. A request counts its prompt and the most
tokens that it may sample. There are two loads: as in a run (the limit on sampled tokens is equal, prompts are
lognormal), and fully lognormal requests, where a single one may exceed a tenth of a worker's load.

For comparison, the cost of a decision if the same object were a Ray actor, which is why it is not.
"""

import random
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import ray

from benchmarks.report import heading, met, parser, publish, table
from slime_like.config import ClusterConfig, RolloutConfig
from slime_like.orchestration.cluster.cluster import Cluster
from slime_like.orchestration.rollout.supervisor import EngineStart, EngineSupervisor

WORKERS, REQUESTS, IN_FLIGHT, ASKED = 64, 50_000, 64 * 64, 2_000
GOAL_PER_S, GOAL_IMBALANCE = 5_000, 0.10


@dataclass(frozen=True)
class Figures:
    """``imbalance``: worst excess of the busiest worker over the mean; ``largest``: largest request over the mean."""

    per_s: float
    imbalance: float
    largest: float


class Engines:
    """An ``EngineGroup`` whose engines only have names."""

    def __len__(self) -> int:
        return WORKERS

    def start(self, left: object) -> None: ...

    def actor(self, index: int) -> None: ...

    def name(self, index: int) -> str:
        return f"engine {index}"


def arguments(capacity: int) -> tuple[Any, ...]:
    """Return the arguments of a supervisor whose engines hold ``capacity`` requests each."""
    return Engines(), RolloutConfig(max_concurrent_requests=capacity), print


def route(sizes: Sequence[int]) -> Figures:
    """Route requests of these sizes."""
    registry = EngineSupervisor(*arguments(256))
    registry.start()
    running: deque[tuple[EngineStart, int]] = deque()
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
            loads = [engine.tokens for engine in registry.serving]
            mean = sum(loads) / len(loads)
            imbalances.append(max(loads) / mean - 1)
    return Figures(len(sizes) / spent, max(imbalances), max(sizes) / mean)


def ask_an_actor(sizes: Sequence[int]) -> float:
    """Return the decisions per second of a registry in a Ray actor, asked one after another."""
    with TemporaryDirectory() as directory, Cluster(ClusterConfig(), Path(directory) / "worker_logs", slots=1):
        registry = ray.remote(EngineSupervisor).options(num_cpus=0).remote(*arguments(len(sizes)))
        ray.get(registry.start.remote(), timeout=60)
        started = time.perf_counter()
        for size in sizes:
            ray.get(registry.acquire.remote(size), timeout=60)
        return len(sizes) / (time.perf_counter() - started)


def main() -> None:
    options = parser(__doc__).parse_args()
    head, rng = heading(), random.Random(0)
    as_in_a_run = [int(rng.lognormvariate(5.5, 0.8)) + 1 + 8 * 1024 for _ in range(REQUESTS)]
    lognormal = [int(rng.lognormvariate(6.0, 0.8)) + 1 for _ in range(REQUESTS)]
    found, other = route(as_in_a_run), route(lognormal)
    rows = [
        (what, f"{each.per_s:,.0f}", f"{each.imbalance:.1%}", f"{each.largest:.1%}")
        for what, each in (("requests as in a run", found), ("lognormal requests", other))
    ]
    rows.append(("the same object as a Ray actor", f"{ask_an_actor(as_in_a_run[:ASKED]):,.0f}", "", ""))
    columns = " | decisions a second | busiest above the mean | largest request, of a mean load"
    is_met = found.per_s >= GOAL_PER_S and found.imbalance <= GOAL_IMBALANCE
    goal = f"Goals as in a run: {GOAL_PER_S:,} a second, {GOAL_IMBALANCE:.0%} above the mean: {met(is_met)}."
    publish(f"{head}\n\n{table(columns, rows)}\n\n{goal}", options.result)


if __name__ == "__main__":
    main()
