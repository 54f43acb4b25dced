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
from typing import Any, cast

import ray

from benchmarks.report import heading, met, parser, publish, table
from slime_like.config import ClusterConfig
from slime_like.interfaces import GenerationRequest, PromptInput, SamplingParams
from slime_like.orchestration.cluster.cluster import Cluster
from slime_like.orchestration.rollout.engine_instance import Dispatcher, EngineCall, EngineInstance

WORKERS, REQUESTS, IN_FLIGHT, ASKED = 64, 50_000, 64 * 64, 2_000
GOAL_PER_S, GOAL_IMBALANCE = 5_000, 0.10


@dataclass(frozen=True)
class Figures:
    """``imbalance``: worst excess of the busiest worker over the mean; ``largest``: largest request over the mean."""

    per_s: float
    imbalance: float
    largest: float


class Router:
    """Engines that only have names, with room for ``capacity`` requests each."""

    def __init__(self, capacity: int) -> None:
        self.engines = [EngineInstance(n, f"engine {n}", None, serves=True) for n in range(WORKERS)]
        self._dispatcher = Dispatcher(cast(Any, None), self.engines, capacity)

    def acquire(self, tokens: int) -> EngineCall:
        """Assign a request of so many tokens."""
        sampling = SamplingParams(max_new_tokens=tokens)
        call, engine = EngineCall(GenerationRequest("", PromptInput(()), sampling), 0), self._dispatcher.least_loaded()
        assert engine is not None
        call.assign(engine)
        return call

    def is_assigned(self, tokens: int) -> bool:
        """Assign a request like ``acquire``, for other processes."""
        return self.acquire(tokens).engine is not None


def route(sizes: Sequence[int]) -> Figures:
    """Route requests of these sizes."""
    router = Router(256)
    running: deque[EngineCall] = deque()
    imbalances: list[float] = []
    spent = mean = 0.0
    for index, size in enumerate(sizes):
        started = time.perf_counter()
        running.append(router.acquire(size))
        if len(running) > IN_FLIGHT:
            running.popleft().release()
        spent += time.perf_counter() - started
        if len(running) == IN_FLIGHT and index % 100 == 0:
            loads = [engine.tokens for engine in router.engines]
            mean = sum(loads) / len(loads)
            imbalances.append(max(loads) / mean - 1)
    return Figures(len(sizes) / spent, max(imbalances), max(sizes) / mean)


def ask_an_actor(sizes: Sequence[int]) -> float:
    """Return the decisions per second of a router in a Ray actor, asked one after another."""
    with TemporaryDirectory() as directory, Cluster(ClusterConfig(), Path(directory) / "worker_logs", slots=1):
        router = ray.remote(Router).options(num_cpus=0).remote(len(sizes))
        started = time.perf_counter()
        for size in sizes:
            ray.get(router.is_assigned.remote(size), timeout=60)
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
