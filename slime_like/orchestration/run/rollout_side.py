"""Where a run's trajectories come from, and what goes back: weights to engines, prompts to checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from slime_like.data.ledger import FILE_NAME as LEDGER
from slime_like.data.ledger import Ledger
from slime_like.data.prompts import PromptSource
from slime_like.observability.names import evaluation_metrics
from slime_like.observability.records import ReferenceRecord, SyncRecord
from slime_like.orchestration.rollout.colocation import Turns
from slime_like.orchestration.rollout.evaluation import Evaluator
from slime_like.orchestration.rollout.reference_pool import ReferencePool
from slime_like.orchestration.rollout.source import RolloutSource
from slime_like.orchestration.run.sources import ExperienceSource
from slime_like.orchestration.trainer.checkpoints import Checkpoint
from slime_like.orchestration.weight_sync import SyncReport, WeightSync
from slime_like.trajectory import ScoredTrajectory

Metrics = dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutFigures:
    """The rollout side's part of a step's record; the defaults are those of a run without engines.

    Attributes:
        queued_groups: groups on their way through the engines.
        ready_groups: groups that wait for training.
        dropped_prompts: prompts dropped since the last step.
        gather_s, probe_gap, sync: of the weight sync after the step.
        sync_line: the weight sync in one line.
        reference: work of the reference workers since the last step.
        notes: sentences about the reference workers.
        restarted: sentences about engines that were restarted for the sync.
    """

    queued_groups: int = 0
    ready_groups: int = 0
    dropped_prompts: int = 0
    gather_s: float | None = None
    probe_gap: float | None = None
    sync: SyncRecord | None = None
    sync_line: str = ""
    reference: ReferenceRecord | None = None
    notes: Sequence[str] = ()
    restarted: Sequence[str] = ()


class RolloutSide(Protocol):
    """What the training loop sees of the origin of its trajectories."""

    @property
    def source(self) -> ExperienceSource:
        """Yields the trajectories of a step."""

    def start(self, version: int) -> None:
        """Before the first step: engines serve the weights that the trainers hold as ``version``."""

    def sync(self, version: int) -> None:
        """After the update of step ``version``: engines serve its weights."""

    def advance(self, step: int, trajectories: Sequence[ScoredTrajectory]) -> None:
        """The step is trained and its weights are served: sampling for later steps may go on."""

    def evaluate(self, step: int) -> Metrics:
        """Held-out accuracy under the current weights; empty without an evaluation file."""

    def figures(self, step_s: float) -> RolloutFigures:
        """Return the figures of a step of ``step_s`` seconds, and reset the work counters."""

    def state_dict(self) -> dict[str, Any]:
        """The part of a checkpoint's state; expressible in JSON."""

    def restore(self, checkpoint: Checkpoint) -> None:
        """Go on from where ``checkpoint`` was written."""


class WithoutEngines:
    """Trajectories from disk: no engine is synced, evaluated or reported on.

    Args:
        source: yields the trajectories.
        state: the part of a checkpoint's state.
    """

    def __init__(self, source: ExperienceSource, state: Callable[[], dict[str, Any]]) -> None:
        self.source = source
        self._state = state

    def start(self, version: int) -> None: ...

    def sync(self, version: int) -> None: ...

    def advance(self, step: int, trajectories: Sequence[ScoredTrajectory]) -> None: ...

    def restore(self, checkpoint: Checkpoint) -> None: ...

    def evaluate(self, step: int) -> Metrics:
        return {}

    def figures(self, step_s: float) -> RolloutFigures:
        return RolloutFigures()

    def state_dict(self) -> dict[str, Any]:
        return self._state()


class Evaluation(Protocol):
    """Held-out accuracy; ``NoEvaluation`` has no file to measure it on."""

    def run(self, step: int) -> Metrics: ...


class HeldOutEvaluation:
    """Accuracy on ``evaluation.files``, by the engines."""

    def __init__(self, evaluator: Evaluator, devices: Turns) -> None:
        self._evaluator = evaluator
        self._devices = devices

    def run(self, step: int) -> Metrics:
        self._devices.generation()
        result = self._evaluator.run(step)
        metrics = evaluation_metrics(result.overall)
        for name, record in result.datasets.items():
            metrics |= evaluation_metrics(record, name)
        return metrics


class NoEvaluation:
    """Without an evaluation file."""

    def run(self, step: int) -> Metrics:
        return {}


class ReferenceWork(Protocol):
    """Work of the reference workers since it was last asked for."""

    def take(self, step_s: float) -> tuple[ReferenceRecord | None, list[str]]:
        """Of a step of ``step_s`` seconds: its record, and sentences about workers that left or joined."""


class PoolWork:
    """Work of a pool of reference workers."""

    def __init__(self, pool: ReferencePool) -> None:
        self._pool = pool

    def take(self, step_s: float) -> tuple[ReferenceRecord, list[str]]:
        work = self._pool.take_work()
        notes = list(self._pool.news)
        self._pool.news.clear()
        record = ReferenceRecord(
            total_s=step_s,
            model_running_s=work.busy_s,
            waiting_s=max(0.0, step_s - work.busy_s),
            response_tokens=work.response_tokens,
            total_tokens=work.total_tokens,
        )
        return record, notes


class NoWork:
    """Without reference workers."""

    def take(self, step_s: float) -> tuple[None, list[str]]:
        return None, []


class WithEngines:
    """Trajectories that engines sample: an RL run."""

    _report: SyncReport

    def __init__(
        self,
        source: RolloutSource,
        prompts: PromptSource,
        sync: WeightSync,
        ledger: Ledger,
        evaluation: Evaluation,
        reference: ReferenceWork,
    ) -> None:
        self.source = source
        self._prompts = prompts
        self._sync = sync
        self._ledger = ledger
        self._evaluation = evaluation
        self._reference = reference
        self._dropped_prompts = 0

    def start(self, version: int) -> None:
        self.sync(version)
        self.source.synced(version)

    def sync(self, version: int) -> None:
        self._report = self._sync.run(version)

    def advance(self, step: int, trajectories: Sequence[ScoredTrajectory]) -> None:
        self.source.trained(trajectories, step)
        self.source.synced(step)

    def evaluate(self, step: int) -> Metrics:
        return self._evaluation.run(step)

    def figures(self, step_s: float) -> RolloutFigures:
        queued, ready = self.source.queue_sizes()
        before, self._dropped_prompts = self._dropped_prompts, self._prompts.dropped_prompts
        reference, notes = self._reference.take(step_s)
        return RolloutFigures(
            queued_groups=queued,
            ready_groups=ready,
            dropped_prompts=self._dropped_prompts - before,
            gather_s=self._report.gather_s,
            probe_gap=self._report.probe_gap,
            sync=self._report.record(),
            sync_line=str(self._report),
            reference=reference,
            notes=notes,
            restarted=self._report.restarted,
        )

    def state_dict(self) -> dict[str, Any]:
        return self.source.state_dict()

    def restore(self, checkpoint: Checkpoint) -> None:
        self.source.load_state_dict({**checkpoint.state, "data": checkpoint.data_position()})
        self._ledger.restore(checkpoint.file(LEDGER))
