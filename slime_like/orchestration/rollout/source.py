"""RolloutSource: the batches of a run, sampled and rewarded."""

from collections.abc import Iterator, Sequence

from slime_like.config import RunConfig
from slime_like.data.ledger import Ledger
from slime_like.data.prompts import PromptSource
from slime_like.observability.phases import PhaseClock
from slime_like.orchestration.rollout.colocation import Turns
from slime_like.orchestration.rollout.drivers import RolloutDriver, SynchronousDriver, ThreadedDriver
from slime_like.orchestration.rollout.engine_client import EngineClient
from slime_like.orchestration.rollout.group_store import GroupStore
from slime_like.orchestration.rollout.pipeline import GroupPipeline
from slime_like.orchestration.rollout.reference_pool import ReferencePool
from slime_like.orchestration.rollout.scoring import Scorer
from slime_like.orchestration.rollout.supervisor import EngineSupervisor
from slime_like.trajectory import ScoredTrajectory


class RolloutSource:
    """Yields the trajectories of each training step, and keeps the position of the run.

    With max_staleness 0 everything happens in ``next_batch`` or ``stream``; above 0 a thread samples and scores all the
    time, as far ahead as ``StalenessGate`` allows.

    Args:
        references: score groups before they are ready for training; none where trainers do it.

    Attributes:
        store: the groups that are under way or ready, and the position of the prompts.
    """

    def __init__(
        self,
        config: RunConfig,
        prompts: PromptSource,
        client: EngineClient,
        scorer: Scorer,
        turns: Turns,
        ledger: Ledger,
        supervisor: EngineSupervisor,
        references: ReferencePool | None = None,
    ) -> None:
        self._batch_size = config.rollout.prompts_per_step
        self._scorer = scorer
        self._ledger = ledger
        self.store = GroupStore(config, prompts, ledger)
        pipeline = GroupPipeline(config, self.store, client, scorer, references)
        self._driver: RolloutDriver
        if config.rollout.max_staleness > 0:
            self._driver = ThreadedDriver(pipeline, self.store, supervisor)
        else:
            self._driver = SynchronousDriver(pipeline, self.store, supervisor, turns, config.rollout.oversample)

    def synced(self, version: int) -> None:
        """Record that the engines serve ``version``; the first call starts the sampling thread, where there is one."""
        self.store.serve(version)
        self._driver.start()

    def next_batch(self, step: int, clock: PhaseClock) -> list[ScoredTrajectory]:
        """The groups of training step ``step``, in the order of their ids.

        Raises:
            EngineError, RewardError: from engines and reward workers, also where they happened in the thread.
        """
        groups = [group for part in self._driver.groups(step, self._batch_size, clock) for group in part]
        with clock.phase("reward"):
            return self._scorer.scored(groups, step)

    def stream(self, step: int, clock: PhaseClock) -> Iterator[list[ScoredTrajectory]]:
        """The groups of training step ``step`` as they become ready, a few at a time.

        Raises:
            EngineError, RewardError: as ``next_batch``.
        """
        for groups in self._driver.groups(step, 1, clock):
            with clock.phase("reward"):
                trajectories = self._scorer.scored(groups, step)
            yield trajectories

    def trained(self, trajectories: Sequence[ScoredTrajectory], step: int) -> None:
        """Record that every update of the step has been made."""
        self._ledger.trained(dict.fromkeys(trajectory.group_id for trajectory in trajectories), step)

    def close(self) -> None:
        """End the sampling thread, within a bound. Groups under way stay so in the ledger."""
        self._driver.close()
