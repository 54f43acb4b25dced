"""A run, and the source of its trajectories. Engines sample them; others are in ``stored_sources``."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slime_like.config import RunConfig
from slime_like.config.roles import POLICY
from slime_like.data.ledger import FILE_NAME as LEDGER
from slime_like.observability import names
from slime_like.observability.metrics import PROFILES, MetricLogger
from slime_like.observability.progress import Progress
from slime_like.observability.timing import PhaseClock
from slime_like.orchestration.rollout.advantages import KLCoefficient
from slime_like.orchestration.rollout.engines import DeviceSwitch
from slime_like.orchestration.rollout.evaluation import EvaluationResult, Evaluator
from slime_like.orchestration.rollout.group_table import GENERATE, READY
from slime_like.orchestration.rollout.groups import Groups
from slime_like.orchestration.run.reference import Reference
from slime_like.orchestration.trainer.checkpoint import Checkpoint, CheckpointStore
from slime_like.orchestration.trainer.model_ranks import ModelRanks
from slime_like.orchestration.trainer.rank import TrainerRank
from slime_like.orchestration.weight_sync import SyncReport, WeightSync
from slime_like.system.spans import Spans
from slime_like.trajectory import ScoredTrajectory

if TYPE_CHECKING:
    from slime_like.observability.timeline import Timeline

_READY_GROUPS = "queues/train_replay_buffer_size"


@dataclass(frozen=True, slots=True)
class SourceFigures:
    """A source's part of a step's record.

    Attributes:
        notes: sentences for the user.
        failed: the step's failed rollouts that are not trained, by their last row.
    """

    metrics: Mapping[str, float]
    notes: Sequence[str] = ()
    failed: Sequence[ScoredTrajectory] = ()


class Source:
    """Source of each training step's trajectories. The defaults are for trajectories from disk: there are no engines to
    sync, evaluate or report on.

    Attributes:
        has_rewards: whether its trajectories have rewards.
    """

    has_rewards = True

    def next_batch(self, step: int, clock: PhaseClock) -> list[ScoredTrajectory]:
        """Return the trajectories of step ``step``, and add the time to the clock's phases."""
        raise NotImplementedError

    def stream(self, step: int, clock: PhaseClock) -> Iterator[list[ScoredTrajectory]]:
        """Stream the batch in whole groups as they become ready. No phase is open while the caller has them."""
        yield self.next_batch(step, clock)

    def is_complete(self, step: int) -> bool:
        """Return whether all groups of the step are ready, so ``stream`` no longer waits."""
        return True

    def start(self, version: int) -> None:
        """Make engines serve the trainers' weights as ``version``. Runs before the first step."""

    def sampling(self, progress: Progress) -> AbstractContextManager[object]:
        """Show inside how many groups of the next step are sampled."""
        return nullcontext()

    def sync(self, version: int) -> None:
        """Make engines serve the weights of step ``version``. Runs after its update."""

    def advance(self, step: int, trajectories: Sequence[ScoredTrajectory]) -> None:
        """Record that the step is trained and its weights are served, so sampling for later steps may continue."""

    def state_dict(self) -> dict[str, Any]:
        """Return the source's part of a checkpoint's state; expressible in JSON."""
        return {}

    def restore(self, checkpoint: Checkpoint) -> None:
        """Continue from where ``checkpoint`` was written."""

    def evaluate(self, step: int, progress: Progress) -> EvaluationResult | None:
        """Measure held-out accuracy under the current weights. Return ``None`` without an evaluation file."""
        return None

    def profile(self, directory: Path | None) -> None:
        """Start to trace the configured engines, or, with a directory, write their traces there."""

    def take_spans(self) -> dict[str, Spans]:
        """Return what the processes of the source have recorded for the timeline, by process."""
        return {}

    def figures(self, step_s: float) -> SourceFigures:
        """Return the figures of a step of ``step_s`` seconds, and reset the work counters."""
        return SourceFigures({_READY_GROUPS: 0.0})


class SampledGroups(Source):
    """Trajectories sampled by engines, which the source syncs and evaluates.

    Args:
        devices: turns on devices that trainers and engines may share.
    """

    _report: SyncReport

    def __init__(self, groups: Groups, devices: DeviceSwitch, sync: WeightSync, evaluator: Evaluator | None) -> None:
        self._groups = groups
        self._devices = devices
        self._sync = sync
        self._evaluator = evaluator
        self._dropped_prompts = 0
        self._notes: list[str] = []
        self._is_first_step = True
        self._idle_s = 0.0

    def next_batch(self, step: int, clock: PhaseClock) -> list[ScoredTrajectory]:
        self._prepare_devices(clock)
        return self._groups.next_batch(step, clock)

    def stream(self, step: int, clock: PhaseClock) -> Iterator[list[ScoredTrajectory]]:
        self._prepare_devices(clock)
        return self._groups.stream(step, clock)

    def _prepare_devices(self, clock: PhaseClock) -> None:
        if not self._groups.config.rollout.max_staleness:
            with clock.phase("sync"):
                self._devices.generation()

    def is_complete(self, step: int) -> bool:
        return self._groups.is_complete(step)

    def start(self, version: int) -> None:
        self.sync(version)
        self._groups.table.serve(version)

    def sampling(self, progress: Progress) -> AbstractContextManager[object]:
        wanted = self._groups.config.rollout.prompts_per_step
        return progress.waiting("sampling", wanted, "group", self._groups.table.sampled)

    def sync(self, version: int) -> None:
        self._report = self._sync.run(version)
        self._notes += filter(None, [self._report.note])

    def advance(self, step: int, trajectories: Sequence[ScoredTrajectory]) -> None:
        self._groups.trained(trajectories, step)
        groups = self._groups.table.at()
        is_idle = bool(groups) and all(group.stage != GENERATE for group in groups)
        self._idle_s = time.monotonic() - max(group.sampled_at for group in groups) if is_idle else 0.0
        self._groups.table.serve(step)

    def state_dict(self) -> dict[str, Any]:
        return self._groups.table.state_dict()

    def restore(self, checkpoint: Checkpoint) -> None:
        self._groups.table.prompts.load_state_dict({**checkpoint.state, "data": checkpoint.data_position()})
        self._groups.table.ledger.restore(checkpoint.file(LEDGER), checkpoint.state.get("ledger_events"))

    def evaluate(self, step: int, progress: Progress) -> EvaluationResult | None:
        if self._evaluator is None:
            return None
        self._devices.generation()
        return self._evaluator.run(step, progress)

    def profile(self, directory: Path | None) -> None:
        self._groups.engines.profile(self._groups.config.profile, directory)

    def take_spans(self) -> dict[str, Spans]:
        rollout = self._groups.config.rollout
        return self._groups.engines.take_spans() if rollout.agent.is_set or rollout.environment.name else {}

    def figures(self, step_s: float) -> SourceFigures:
        table = self._groups.table
        ready = len(table.at(READY))
        before, self._dropped_prompts = self._dropped_prompts, table.prompts.source.dropped_prompts
        notes, self._notes = self._notes, []
        if self._is_first_step:
            notes.append(str(self._report))
            self._is_first_step = False
        for news in (table.failures.news, *(role.news for role in self._groups.roles)):
            notes += [news.pop(0) for _ in range(len(news))]
        metrics = {
            _READY_GROUPS: float(ready),
            "queues/rollout_queue_size": float(len(table.at()) - ready),
            "rollout/dropped_prompts": float(self._dropped_prompts - before),
            **{name: value for role in self._groups.roles for name, value in role.take_work(step_s).items()},
            **self._report.metrics(step_s),
            **self._accepted_drafts(),
        }
        if self._groups.config.rollout.max_staleness:
            metrics[names.IDLE_ENGINES] = 100 * min(1.0, names.ratio(self._idle_s, step_s))
        return SourceFigures(metrics, notes, table.take_failed())

    def _accepted_drafts(self) -> dict[str, float]:
        """Return the mean tokens of a pass that checked drafted tokens: the accepted ones, and the next."""
        found, self._groups.drafts = self._groups.drafts, []
        passes, accepted = (sum(each[at] for each in found) for at in (0, 1))
        return {"rollout/accepted_length": 1 + accepted / passes} if passes else {}


@dataclass(frozen=True, slots=True)
class Run:
    """An opened run. See ``slime_like.orchestration.run.opening``.

    Attributes:
        finished_steps: number of steps before the resumed checkpoint; 0 in a new run.
        decode: function from token ids to text, by the model's tokenizer.
        source: yields a step's trajectories; with engines, also syncs and evaluates.
        models: models on ranks: the policy, perhaps its critic, and the workers of frozen roles ("reference worker 0").
        devices: moves trainers and engines on and off shared devices.
        reference: refreshes the reference's weights if ``reference.update_interval`` is set.
        kl_reward: coefficient of the KL in the reward.
    """

    config: RunConfig
    finished_steps: int
    decode: Callable[[Sequence[int]], str]
    source: Source
    models: Mapping[str, ModelRanks]
    devices: DeviceSwitch
    reference: Reference
    kl_reward: KLCoefficient
    checkpoints: CheckpointStore
    metrics: MetricLogger
    progress: Progress
    timeline: "Timeline | None" = None

    @contextmanager
    def profiling(self, step: int) -> Iterator[None]:
        """Trace the block on the configured trainer ranks and engines if ``step`` is to be traced."""
        settings = self.config.profile
        if step not in settings.steps:
            yield
            return
        self._profile(None)
        yield
        self._profile(self.config.run_dir / PROFILES / f"step-{step}")

    def write_timeline(self, step: int) -> None:
        """Write what all processes have recorded since the last call."""

        def take() -> dict[str, Spans]:
            trained = [model for model in self.models.values() if model.role.trained]
            asked = [(model.names, model.call("reporting spans", TrainerRank.take_spans)) for model in trained]
            ranks = {name: spans for names, each in asked for name, spans in zip(names, each, strict=True)}
            return ranks | self.source.take_spans()

        if self.timeline is not None:
            self.timeline.write(step, take)

    def _profile(self, directory: Path | None) -> None:
        settings = self.config.profile
        paths = {rank: directory and str(directory / f"rank-{rank}") for rank in settings.ranks}
        calls = {rank: (path, settings.memory) for rank, path in paths.items()}
        answers = self.policy.start_each("profiling", TrainerRank.profile, calls)
        self.source.profile(directory)
        answers.result()

    @property
    def policy(self) -> ModelRanks:
        return self.models[POLICY]
