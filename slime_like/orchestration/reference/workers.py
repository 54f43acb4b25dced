"""Reference workers: trainer ranks that hold the reference's weights and score with the trainer's function."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack
from pathlib import Path

from torch import Tensor

from slime_like.config import RunConfig
from slime_like.errors import TrainerError
from slime_like.interfaces import TrainerBackend
from slime_like.observability.waiting import ignore_answers
from slime_like.orchestration.cluster.placement import Placement
from slime_like.orchestration.reference.config import worker_config
from slime_like.orchestration.rollout.reference_pool import ReferencePool
from slime_like.orchestration.trainer.group import TrainerGroup
from slime_like.orchestration.trainer.scoring import request_tokens, score_sequences
from slime_like.trajectory import UnscoredTrajectory


class RankedReference:
    """One worker, with the trainer ranks of ``reference.parallel``."""

    def __init__(self, config: RunConfig, placement: Placement, index: int) -> None:
        self._config = worker_config(config)
        self._placement = placement
        self._index = index
        self.name = f"reference worker {index}"
        self._guard = threading.Lock()
        self._closed = False
        self._weights: Path | None = None
        self._trainers = self._new_trainers()

    def _new_trainers(self) -> TrainerGroup:
        return TrainerGroup(self._config, self._placement, self._index)

    def launch(self) -> None:
        """Create the ranks. They import in the background until ``setup`` waits for them."""
        self._trainers.launch()

    def setup(self) -> None:
        self._trainers.setup(only_scores=True, checkpoint=self._weights)

    def use(self, weights: Path) -> None:
        if weights != self._weights:
            self._trainers.ranks.call("loading the policy weights", TrainerBackend.load_weights, weights, "policy")
            self._weights = weights

    def score(self, trajectories: list[UnscoredTrajectory]) -> list[Tensor]:
        scores = score_sequences(self._trainers.ranks, trajectories, self._config.trainer)
        return [score.logprobs for score in scores]

    def restart(self, weights: Path | None) -> None:
        self._trainers.shutdown()
        self._weights = weights
        with self._guard:  # a concurrent close finds either all new ranks or none
            if self._closed:
                raise TrainerError("the run has ended", code="run-ended", who=self.name, phase="starting again")
            self._trainers = self._new_trainers()
            self._trainers.launch()
        self.setup()

    def close(self) -> None:
        with self._guard:
            closed, self._closed = self._closed, True
        if not closed:
            self._trainers.shutdown()


def launch_references(config: RunConfig, stack: ExitStack, placement: Placement) -> list[RankedReference]:
    """Launch the workers without waiting for them. ``stack`` ends them."""
    workers = [RankedReference(config, placement, index) for index in range(config.reference_workers)]
    for worker in workers:
        stack.callback(worker.close)
        worker.launch()
    return workers


def reference_pool(
    config: RunConfig, workers: list[RankedReference], left: Callable[[Sequence[str]], None] = ignore_answers
) -> ReferencePool | None:
    """Build a pool, which each worker joins after loading its weights; ``None`` without workers.

    Args:
        left: called with the workers that are not ready yet.
    """
    if not workers:
        return None
    loading = [worker.name for worker in workers]
    left(loading)
    with ThreadPoolExecutor(len(workers)) as threads:
        setups = {threads.submit(worker.setup): worker.name for worker in workers}
        for setup in as_completed(setups):
            setup.result()
            loading.remove(setups[setup])
            left(loading)
    pool = ReferencePool(request_tokens(worker_config(config).trainer), config.reference.max_worker_restarts)
    for worker in workers:
        pool.join(worker)
    return pool
