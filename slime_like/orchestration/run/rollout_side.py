"""The rollout side of a run: trajectories, weights for engines, and the prompts' state in checkpoints."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from slime_like.data.ledger import FILE_NAME as LEDGER
from slime_like.observability.progress import Progress
from slime_like.orchestration.rollout.evaluation import EvaluationResult, Evaluator
from slime_like.orchestration.rollout.source import RolloutSource
from slime_like.orchestration.run.sources import ExperienceSource
from slime_like.orchestration.trainer.checkpoint import Checkpoint
from slime_like.orchestration.weight_sync import SyncReport, WeightSync
from slime_like.trajectory import ScoredTrajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutFigures:
    """Figures of the rollout side in a step's record. The defaults are for a run without engines.

    Attributes:
        queued_groups: number of groups on their way through the engines.
        ready_groups: number of groups waiting for training.
        scoring: metrics of roles with workers.
        failed: the step's failed rollouts that are not trained, by their last row.
    """

    queued_groups: int = 0
    ready_groups: int = 0
    dropped_prompts: int = 0
    sync: SyncReport | None = None
    scoring: Mapping[str, float] = field(default_factory=dict)
    notes: Sequence[str] = ()
    failed: Sequence[ScoredTrajectory] = ()


class RolloutSide:
    """Rollout side with trajectories from disk. It has no engines to sync, evaluate or report on.

    Args:
        state: returns this side's part of a checkpoint's state; expressible in JSON.
    """

    def __init__(self, source: ExperienceSource, state: Callable[[], dict[str, Any]]) -> None:
        self.source = source
        self.state_dict = state

    def start(self, version: int) -> None:
        """Make engines serve the trainers' weights as ``version``. Runs before the first step."""

    def sampling(self, progress: Progress) -> AbstractContextManager[object]:
        """Show inside how many groups of the next step are sampled."""
        return nullcontext()

    def sync(self, version: int) -> None:
        """Make engines serve the weights of step ``version``. Runs after its update."""

    def advance(self, step: int, trajectories: Sequence[ScoredTrajectory]) -> None:
        """Record that the step is trained and its weights are served, so sampling for later steps may continue."""

    def restore(self, checkpoint: Checkpoint) -> None:
        """Continue from where ``checkpoint`` was written."""

    def evaluate(self, step: int, progress: Progress) -> EvaluationResult | None:
        """Measure held-out accuracy under the current weights. Return ``None`` without an evaluation file."""
        return None

    def figures(self, step_s: float) -> RolloutFigures:
        """Return the figures of a step of ``step_s`` seconds, and reset the work counters."""
        return RolloutFigures()


class EngineSide(RolloutSide):
    """Rollout side with trajectories sampled by engines."""

    source: RolloutSource
    _report: SyncReport

    def __init__(self, source: RolloutSource, sync: WeightSync, evaluator: Evaluator | None) -> None:
        super().__init__(source, source.store.state_dict)
        self._sync = sync
        self._evaluator = evaluator
        self._dropped_prompts = 0
        self._sync_notes: list[str] = []

    def start(self, version: int) -> None:
        self.sync(version)
        self.source.synced(version)

    def sampling(self, progress: Progress) -> AbstractContextManager[object]:
        wanted = self.source.config.rollout.prompts_per_step
        return progress.waiting("sampling", wanted, "group", self.source.store.sampled)

    def sync(self, version: int) -> None:
        self._report = self._sync.run(version)
        self._sync_notes += filter(None, [self._report.note])

    def advance(self, step: int, trajectories: Sequence[ScoredTrajectory]) -> None:
        self.source.trained(trajectories, step)
        self.source.synced(step)

    def restore(self, checkpoint: Checkpoint) -> None:
        self.source.store.load_state_dict({**checkpoint.state, "data": checkpoint.data_position()})
        self.source.store.ledger.restore(checkpoint.file(LEDGER), checkpoint.state.get("ledger_events"))

    def evaluate(self, step: int, progress: Progress) -> EvaluationResult | None:
        if self._evaluator is None:
            return None
        self.source.turns.generation()
        return self._evaluator.run(step, progress)

    def figures(self, step_s: float) -> RolloutFigures:
        queued, ready = self.source.store.sizes()
        before, self._dropped_prompts = self._dropped_prompts, self.source.store.prompts.dropped_prompts
        lists = [self._sync_notes, *(pool.news for pool in self.source.pools)]
        notes = [sentences.pop(0) for sentences in lists for _ in range(len(sentences))]
        return RolloutFigures(
            queued_groups=queued,
            ready_groups=ready,
            dropped_prompts=self._dropped_prompts - before,
            sync=self._report,
            scoring={name: value for pool in self.source.pools for name, value in pool.take_work(step_s).items()},
            notes=notes,
            failed=self.source.store.take_failed(),
        )
