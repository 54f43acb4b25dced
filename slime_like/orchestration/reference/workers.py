"""Workers of a role: trainer ranks that hold its weights and score with the trainer's function."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from slime_like.config import RunConfig
from slime_like.errors import TrainerError
from slime_like.interfaces import Scores
from slime_like.orchestration.cluster.placement import Placement
from slime_like.orchestration.rollout.role_pool import RolePool
from slime_like.orchestration.trainer.group import TrainerGroup
from slime_like.orchestration.trainer.rank import TrainerRank
from slime_like.orchestration.trainer.scoring import request_tokens, score_sequences
from slime_like.trajectory import UnscoredTrajectory


class RankedWorker:
    """One worker, with the trainer ranks of its role's layout. ``index`` counts the workers of all roles."""

    def __init__(self, config: RunConfig, placement: Placement, index: int) -> None:
        self.role = placement.workers[index]
        settings = config.for_worker(self.role)
        self.trainer = settings.trainer
        self.name = f"{self.role.name} worker {index}"
        self._guard = threading.Lock()
        self._closed = False
        self._weights: Path | None = None
        self._new_trainers = partial(TrainerGroup, settings, placement, index)
        self._trainers = self._new_trainers()

    def launch(self) -> None:
        """Create the ranks. They import in the background until ``setup`` waits for them."""
        self._trainers.launch()

    def setup(self) -> None:
        self._trainers.setup(only_scores=True, checkpoint=self._weights)

    def use(self, weights: Path) -> None:
        if weights != self._weights:
            phase = f"loading the {self.role.name} weights"
            self._trainers.ranks.call(phase, TrainerRank.load_weights, weights, self.role.name)
            self._weights = weights

    def score(self, trajectories: list[UnscoredTrajectory]) -> list[Scores]:
        return score_sequences(self._trainers.ranks, trajectories, self.trainer)

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


def role_pools(stack: ExitStack, workers: list[RankedWorker], left: Callable[[Sequence[str]], None]) -> list[RolePool]:
    """Build a pool per role, which each worker joins after loading its weights. ``stack`` closes them.

    Args:
        left: called with the workers that are not ready yet.
    """
    loading = [worker.name for worker in workers]
    left(loading)
    with ThreadPoolExecutor(max(1, len(workers))) as threads:
        setups = {threads.submit(worker.setup): worker.name for worker in workers}
        for setup in as_completed(setups):
            setup.result()
            loading.remove(setups[setup])
            left(loading)
    pools = dict[str, RolePool]()
    for worker in workers:
        role = worker.role
        if role.name not in pools:
            pools[role.name] = RolePool(role.name, request_tokens(worker.trainer), role.max_restarts, role.source)
            stack.callback(pools[role.name].close)
        pools[role.name].join(worker)
    return list(pools.values())
