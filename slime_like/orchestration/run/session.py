"""Everything a run holds open, started in order and closed in reverse, whatever happens in between."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from slime_like.checks.engine_install import version_warning
from slime_like.config import RunConfig
from slime_like.cpu.choice import operators_note
from slime_like.data.ledger import FILE_NAME as LEDGER
from slime_like.data.ledger import Ledger
from slime_like.data.prompts import PromptSource, load_tokenizer
from slime_like.models.dimensions import ModelDimensions
from slime_like.observability.metrics import MetricLogger
from slime_like.observability.progress import Progress
from slime_like.orchestration.cluster.bundles import bundle_sizes
from slime_like.orchestration.cluster.cluster import Cluster
from slime_like.orchestration.cluster.placement import Placement
from slime_like.orchestration.cluster.ray_calls import nobody
from slime_like.orchestration.reference.refresh import REFERENCE, MovingReference
from slime_like.orchestration.reference.workers import launch_references, reference_pool
from slime_like.orchestration.rollout.advantages import require_group_scope
from slime_like.orchestration.rollout.colocation import OwnDevices, SharedDevices, Turns
from slime_like.orchestration.rollout.engine_class import require_servable
from slime_like.orchestration.rollout.engine_group import EngineGroup
from slime_like.orchestration.rollout.evaluation import Evaluator, held_out
from slime_like.orchestration.rollout.manager import RolloutManager
from slime_like.orchestration.rollout.reference_pool import ReferencePool
from slime_like.orchestration.rollout.scoring import Scorer
from slime_like.orchestration.rollout.source import RolloutSource
from slime_like.orchestration.rollout.supervisor import EngineSupervisor
from slime_like.orchestration.run.directory import find_checkpoint, latest_checkpoint, make_run_dir, record_settings
from slime_like.orchestration.run.lock import RunLock
from slime_like.orchestration.run.sources import DemonstrationSource, DumpedSource, ExperienceSource
from slime_like.orchestration.trainer.batcher import ExperienceBatcher
from slime_like.orchestration.trainer.checkpoints import Checkpoint, CheckpointStore
from slime_like.orchestration.trainer.group import TrainerGroup
from slime_like.orchestration.weight_sync import WeightSync, transport_of
from slime_like.sandbox.rewards.pool import RewardPool


@dataclass(slots=True)
class RolloutSide:
    """What a run without engines does without."""

    sync: WeightSync
    source: RolloutSource
    evaluator: Evaluator | None
    ledger: Ledger
    references: ReferencePool | None


def launch_engines(
    config: RunConfig,
    stack: ExitStack,
    placement: Placement,
    note: Callable[[str], None],
    shared_devices: Sequence[str] = (),
    watch: Callable[[], None] = nobody,
) -> tuple[RolloutManager, RewardPool]:
    """Engines and reward workers on their way up; ``start`` of either waits for it, and ``stack`` ends both.

    Args:
        note: see ``EngineSupervisor``.
        watch: see ``EngineGroup``.
    """
    group = EngineGroup(config, placement, watch)
    stack.callback(group.shutdown)
    group.launch(shared_devices)
    pool = RewardPool(config.reward)
    stack.callback(pool.close)
    return RolloutManager(config, EngineSupervisor(group, config.rollout.max_engine_restarts, note)), pool


class Session:
    """Context manager over cluster, trainers, engines, reward workers and loggers.

    Attributes:
        config: the run's configuration.
        tokenizer: the model's own.
        prompts: training prompts and their position; ``None`` when training on kept rollouts.
        source: yields a step's trajectories.
        batcher: packs them.
        trainers: all trainer ranks.
        turns: who may use the devices, where trainers and engines share them.
        reference: refreshes the reference's weights where ``reference.update_interval`` says so.
        rollout: engines, scoring, sync and evaluation; ``None`` in supervised mode and when training on kept rollouts.
        checkpoints, metrics, progress: where results go.
        resumed: the checkpoint this run went on from, if any.
    """

    prompts: PromptSource | None
    source: ExperienceSource
    batcher: ExperienceBatcher
    trainers: TrainerGroup
    reference: MovingReference
    rollout: RolloutSide | None
    resumed: Checkpoint | None
    tokenizer: Any

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self.turns: Turns = OwnDevices()
        self._stack = ExitStack()

    def __enter__(self) -> Session:
        with self._stack as stack:
            self._open(stack)
            self._stack = stack.pop_all()
        return self

    @property
    def finished_steps(self) -> int:
        """Steps that the resumed checkpoint has behind it; 0 in a new run."""
        return self.resumed.step if self.resumed else 0

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._stack:
            if kind is not None:
                self.checkpoints.rescue()
                self._tell_where_it_goes_on()

    def _tell_where_it_goes_on(self) -> None:
        latest = latest_checkpoint(self.config.run_dir)
        if latest is not None:
            self.progress.note(f"started again with --resume auto, the run goes on from {latest.resolve()}")

    def _open(self, stack: ExitStack) -> None:
        config = self.config
        if config.rollout.stream and not config.supervised:
            require_group_scope(config)
        lock = stack.enter_context(RunLock(config.run_dir))
        self.resumed = find_checkpoint(config)
        tokenizer = self.tokenizer = load_tokenizer(config.model.path)
        dump = config.debug.load_rollouts
        prompts = self.prompts = (
            None
            if dump
            else PromptSource(config.data.train, tokenizer, config.data, config.seed, need_responses=config.supervised)
        )
        samples = prompts is not None and not config.supervised
        self._held_out = held_out(config, tokenizer) if samples else {}
        self._position_prompts()
        make_run_dir(config, self.resumed, lock)
        self.metrics = MetricLogger(config.logging, config.run_dir)
        stack.callback(self.metrics.close)
        self.progress = stack.enter_context(Progress(config.logging.progress, config.steps))
        if lock.warning:
            self.progress.note(lock.warning)
        self.progress.note("starting Ray, trainers and engines" if samples else "starting Ray and trainers")
        cluster = stack.enter_context(
            Cluster(
                config.cluster,
                config.run_dir / "worker_logs",
                sum(bundle_sizes(config)),
                [config.sync.directory] if config.sync.directory else [],
            )
        )
        placement = stack.enter_context(Placement(config))
        if placement.device == "CPU":
            self.progress.note(operators_note(config.trainer.cpu_kernels))
        if samples:
            transport_of(config, placement)  # one that does not reach is refused before minutes of starting,
            require_servable(config, placement.device == "GPU")  # and so is an engine that could not be trained with
        self.trainers = TrainerGroup(config, placement)
        self.checkpoints = CheckpointStore(config.run_dir, config.checkpoint.keep, self.trainers)
        stack.callback(self.checkpoints.abandon)  # after the trainers have ended
        stack.callback(self.trainers.shutdown)
        self.trainers.launch()
        self.rollout = None
        if prompts is None:
            assert dump is not None
            self.source = DumpedSource(dump, ModelDimensions.from_checkpoint(config.model.path).vocab_size)
            self.trainers.setup()
        elif config.supervised:
            self.source = DemonstrationSource(config, prompts)
            self.trainers.setup()
        else:
            self.rollout = self._open_rollout(stack, placement, prompts, cluster.run_name)
            self.source = self.rollout.source
            self.checkpoints.also_write(self.rollout.ledger.snapshot, LEDGER)
        self.reference = MovingReference(config, self.trainers, self.rollout.references if self.rollout else None)
        self.checkpoints.also_link(self.reference.files, REFERENCE)
        if self.resumed is not None:
            if self.rollout is not None:
                self.rollout.source.load_state_dict({**self.resumed.state, "data": self.resumed.data_position()})
                self.rollout.ledger.restore(self.resumed.file(LEDGER))
            self.trainers.load(self.resumed.trainer)
            self.reference.restore(self.resumed)
            self.progress.note(f"resumed from {self.resumed.path} after step {self.resumed.step}")
            if changed := record_settings(config, self.resumed):
                self.progress.note(f"settings that differ from the earlier start: {'; '.join(changed)}")
        pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0
        self.batcher = ExperienceBatcher(config, self.trainers.data_parallel_size, pad)

    def _position_prompts(self) -> None:
        """Go on in the prompts where the checkpoint was. What does not fit is refused before anything starts."""
        if self.resumed is None or self.prompts is None:
            return
        self.prompts.load_state_dict(self.resumed.data_position())
        if not self.config.supervised:
            self.resumed.file(LEDGER)

    def _open_rollout(
        self, stack: ExitStack, placement: Placement, prompts: PromptSource, run_name: str
    ) -> RolloutSide:
        """Trainers and engines import at the same time; each is waited for with its own bound."""
        config, colocated = self.config, self.config.cluster.placement == "colocated"
        if warning := version_warning(config.rollout.python, config.rollout.engine):
            self.progress.note(warning)
        devices = self.trainers.devices() if colocated else ()
        watch, note = self.trainers.liveness().check, self.progress.note
        engines, pool = launch_engines(config, stack, placement, note, devices, watch)
        supervisor = engines.supervisor
        scorer = Scorer(config, pool, self.tokenizer)
        workers = launch_references(config, stack, placement)
        self.trainers.setup()
        pool.start()
        if colocated:
            self.trainers.offload()
        supervisor.start()
        references = reference_pool(config, workers)
        if references is not None:
            stack.callback(references.close)
        if colocated:
            supervisor.sleep()
            self.trainers.onload()
            self.turns = SharedDevices(self.trainers, supervisor)
        sync = WeightSync(config, self.trainers, supervisor, placement, self.turns, run_name)
        sync.connect()
        evaluator = Evaluator(config, engines, scorer, self._held_out) if self._held_out else None
        ledger = Ledger.begin(config.run_dir)
        stack.callback(ledger.close)
        source = RolloutSource(config, prompts, engines.client(), scorer, self.turns, ledger, supervisor, references)
        stack.callback(source.close)
        return RolloutSide(sync, source, evaluator, ledger, references)
