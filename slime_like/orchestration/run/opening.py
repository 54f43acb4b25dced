"""Three ways to open a run, and its first notes. Everything started is closed in reverse order."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slime_like.agents.responses import require_calls
from slime_like.checks.engines import chosen_transport
from slime_like.config import RunConfig
from slime_like.config.roles import CRITIC, POLICY
from slime_like.data.ledger import FILE_NAME as LEDGER
from slime_like.data.ledger import Ledger
from slime_like.data.prompts import Prompt, PromptSource
from slime_like.data.token_rows import TokenBudget
from slime_like.errors import CheckpointError
from slime_like.interfaces.engine_limits import engine_limits
from slime_like.models.dimensions import ModelDimensions
from slime_like.models.tokenization import load_tokenizer
from slime_like.models.weight_files import WeightFilesError, header_shapes, is_router_bias
from slime_like.observability.metrics import MetricLogger
from slime_like.observability.progress import DRIVER_LOG, Progress
from slime_like.orchestration.cluster.bundles import pieces_of
from slime_like.orchestration.cluster.cluster import Cluster
from slime_like.orchestration.cluster.placement import Placement
from slime_like.orchestration.rollout.advantages import KLCoefficient, require_group_scope
from slime_like.orchestration.rollout.engines import DeviceSwitch
from slime_like.orchestration.rollout.evaluation import Evaluator, held_out
from slime_like.orchestration.rollout.groups import Groups
from slime_like.orchestration.rollout.requests import stop_tokens, turn_form
from slime_like.orchestration.rollout.scoring import Scorer
from slime_like.orchestration.rollout.sync_probe import Probe
from slime_like.orchestration.run.directory import ENCODED_ROWS, RunDirectory
from slime_like.orchestration.run.engines import require_quantizable, require_servable, start_engines
from slime_like.orchestration.run.lock import RunLock
from slime_like.orchestration.run.reference import REFERENCE, Reference
from slime_like.orchestration.run.sources import Run, SampledGroups, Source
from slime_like.orchestration.trainer.batcher import require_token_ratios
from slime_like.orchestration.trainer.checkpoint import UNUSABLE, Checkpoint, CheckpointStore, latest_checkpoint
from slime_like.orchestration.trainer.model_ranks import ModelRanks
from slime_like.orchestration.trainer.rank import TrainerRank
from slime_like.orchestration.weight_sync import WeightSync
from slime_like.plugins.options import load_option
from slime_like.sandbox.rewards.registry import required_of_rows
from slime_like.system.gpus import local_gpus
from slime_like.system.words import pluralize

if TYPE_CHECKING:
    from slime_like.observability.timeline import Timeline
    from slime_like.orchestration.rollout.roles import RoleQueue


@contextmanager
def open_run(config: RunConfig) -> Iterator[Run]:
    """Open a run. If the body fails, finished files are kept, and the exception gets a note with the resume point.

    Raises:
        SlimeLikeError: in one sentence; all processes have ended.
    """
    with ExitStack() as stack:
        run = _open(config, stack)
        try:
            yield run
        except BaseException as error:
            run.checkpoints.rescue()
            if (latest := latest_checkpoint(config.run_dir)) is not None:
                error.add_note(f"restart with --resume auto to resume from {latest.resolve()}")
            elif isinstance(error, KeyboardInterrupt):
                every = f"checkpoint.every={config.checkpoint.every}"
                error.add_note(f"no checkpoint has been written ({every}); a restart begins with step 1")
            raise


def _open(config: RunConfig, stack: ExitStack) -> Run:
    if config.rollout.stream and config.starts_engines:
        require_group_scope(config.algorithm.advantage.name)
    if config.rollout.agent.is_set and config.starts_engines:
        require_token_ratios(config.algorithm)
    lock = stack.enter_context(RunLock(config.run_dir))
    directory = RunDirectory(config)
    checkpoint = directory.find_checkpoint()
    tokenizer = load_tokenizer(config.model.path, config.model.trust_remote_code)
    damaged: dict[Path, str] = {}
    while True:
        try:
            with ExitStack() as attempt:
                run = _open_from(_Base(config, attempt, lock, directory, checkpoint, tokenizer))
                stack.push(attempt.pop_all())
                return run
        except CheckpointError as error:  # only the ranks read all of a checkpoint
            if checkpoint is None or config.resume != "auto" or error.code not in UNUSABLE:
                raise
            damaged[checkpoint.path] = error.problem
            checkpoint = directory.find_checkpoint(damaged)
            if checkpoint is None:
                raise


def _open_from(base: _Base) -> Run:
    """Open a run on saved rollouts (no prompts, no engines), demonstrations (no engines), or sampled rollouts."""
    config = base.config
    if config.debug.load_rollouts is not None:
        vocab_size = ModelDimensions.from_checkpoint(config.model.path).vocab_size
        saved = load_option("saved-rollouts")(config.debug.load_rollouts, vocab_size, not config.supervised)
        return _without_engines(base, saved)
    if config.starts_engines:
        return _open_rl(base)
    prompts, wanted = base.prompts(need_responses=True), config.rollout.prompts_per_step
    notes = data_notes(config.data.max_prompt_tokens, wanted, prompts)
    return _without_engines(base, load_option("demonstrations")(prompts, wanted), *notes)


def _without_engines(base: _Base, source: Source, *notes: str) -> Run:
    placed = base.place("starting Ray and trainers", *notes)
    placed.launch()
    placed.set_up_trained()
    return placed.run(source, DeviceSwitch())


def _open_rl(base: _Base) -> Run:
    """Open a run on rollouts sampled by engines."""
    config, stack = base.config, base.stack
    prompts = base.prompts(LEDGER, need_responses=False)
    datasets = held_out(config, base.tokenizer)
    if config.cluster.address is None:  # one host, whose devices are known before Ray starts
        _require_usable(config, on_cuda=local_gpus() > 0, hosts=1)
    notes = data_notes(config.data.max_prompt_tokens, config.rollout.prompts_per_step, prompts, datasets)
    placed = base.place("starting Ray, trainers and engines", *notes)
    placement, models, progress = placed.placement, placed.models, placed.progress
    transport = _require_usable(config, on_cuda=placement.device == "GPU", hosts=placement.num_nodes)
    placed.launch()
    started = start_engines(config, stack, placement, models, progress, placed.set_up_trained)
    engines, rewards, pools, devices = started
    model, policy = config.model, models[POLICY]
    tolerance, quantized = config.sync.probe_tolerance, (config.sync.quantization, config.trainer.fp8) != ("none",) * 2
    probe = Probe(model, tolerance, config.max_model_len, prompts.longest(2), quantized)
    sync = WeightSync(config.sync, transport, model.dtype, probe, policy, engines, devices, placed.run_name)
    with progress.waiting("connecting trainers and engines"):
        sync.connect()
    scorer = Scorer(config, rewards, base.tokenizer, stop_tokens(config.rollout, config.model))
    ledger = Ledger.begin(config.run_dir)
    stack.callback(ledger.close)
    placed.checkpoints.written[LEDGER] = ledger.snapshot
    groups = Groups(config, prompts, engines, scorer, ledger, pools)
    stack.callback(groups.close)
    evaluator = Evaluator(config, engines, scorer, datasets) if datasets else None
    return placed.run(SampledGroups(groups, devices, sync, evaluator), devices, pools)


def _require_usable(config: RunConfig, on_cuda: bool, hosts: int) -> str:
    """Reject an engine that cannot be updated, before minutes of starting. Return the weights' transport."""
    transport = chosen_transport(config, on_cuda, hosts)
    require_servable(config.rollout.engine, config.model, on_cuda, config.algorithm.routing_replay == "rollout")
    require_quantizable(config.sync, config.rollout.engine, config.model, on_cuda)
    return transport


# ------------------------------------------------------------------------------------------------------- shared parts
@dataclass(frozen=True, slots=True)
class _Base:
    """A run before anything is written or started. ``stack`` closes what is opened."""

    config: RunConfig
    stack: ExitStack
    lock: RunLock
    directory: RunDirectory
    checkpoint: Checkpoint | None
    tokenizer: Any

    @property
    def pad_id(self) -> int:
        """Token id of padding."""
        return self.tokenizer.pad_token_id or 0

    def prompts(self, *files: str, need_responses: bool) -> PromptSource:
        """Return the training prompts, at the checkpoint's position if there is one. It must contain ``files``."""
        data, seed = self.config.data, self.config.seed
        change = "data" in self.config.checkpoint.override
        common: dict[str, Any] = {"may_change": change, "cache": data.cache_dir or self.config.run_dir / ENCODED_ROWS}
        if need_responses:
            stops = stop_tokens(self.config.rollout, self.config.model) if data.apply_chat_template else ()
            excess = TokenBudget(self.config.trainer).excess
            prompts = PromptSource(data.train, self.tokenizer, data, seed, True, stops, excess, **common)
        else:
            agent, path = self.config.rollout.agent, self.config.model.path
            needs = required_of_rows(self.config.reward, agent.is_set)
            prompts = PromptSource(data.train, self.tokenizer, data, seed, **common, **needs)
            require_calls(turn_form(data, agent, self.tokenizer), agent, path, prompts.has_tools)
        if self.checkpoint is not None:
            prompts.load_state_dict(self.checkpoint.data_position())
            for name in files:
                self.checkpoint.file(name)
        return prompts

    def place(self, start: str, *notes: str) -> _Placed:
        """Create the run directory, start Ray, and reserve the devices."""
        config, stack = self.config, self.stack
        aside = self.directory.make(self.checkpoint, self.lock)
        finished = 0 if self.checkpoint is None else self.checkpoint.step
        metrics = MetricLogger(config.logging, config.run_dir, finished)
        stack.callback(metrics.close)
        timeline = load_option("timeline")(config.run_dir, finished) if config.logging.timeline else None
        if timeline is not None:
            stack.callback(timeline.close)
        log = stack.enter_context((config.run_dir / DRIVER_LOG).open("a", encoding="utf-8"))
        progress = stack.enter_context(Progress(config.logging.progress, config.steps, log=log))
        why = ", since it has no complete checkpoint" if config.resume == "auto" else ""
        moved = f"moved the earlier run in {config.run_dir} to {aside}{why}" if aside is not None else ""
        damaged = "" if self.checkpoint is None else self.checkpoint.passed_over
        routers = router_note(config.model.path, config.trainer.router_bias_rate)
        left_out = critic_note(self.checkpoint, config.algorithm.needs_critic)
        found = self.lock.warning, moved, damaged, left_out, *notes, *settings_notes(config), routers, start
        for note in filter(None, found):
            progress.note(note)
        bucket_directories = [config.sync.directory] if config.sync.directory else []
        logs, slots = config.run_dir / "worker_logs", sum(pieces_of(config).bundles)
        with progress.waiting("starting Ray"):
            cluster = stack.enter_context(Cluster(config.cluster, logs, slots, bucket_directories, progress.note))
            placement = stack.enter_context(Placement(config))
        models, resumed = (
            _models_on_ranks(config, placement, self.pad_id),
            None if self.checkpoint is None else finished,
        )
        trained = [model for model in models.values() if model.role.trained]
        keep, every = config.checkpoint.keep, config.checkpoint.keep_every
        checkpoints = CheckpointStore(config.run_dir, keep, trained, progress.note, resumed, every)
        return _Placed(self, metrics, progress, timeline, placement, cluster.run_name, models, trained, checkpoints)


def _models_on_ranks(config: RunConfig, placement: Placement, pad_id: int) -> dict[str, ModelRanks]:
    """Return the models of ``Run.models``, whose ranks are not launched yet."""
    policy = ModelRanks(config, placement, pad_token_id=pad_id)
    models = {POLICY: policy}
    if config.algorithm.needs_critic and config.critic.placement == "shared":
        models[CRITIC] = ModelRanks(config.for_critic(), placement, None, policy, pad_id)
    for index, role in enumerate(placement.workers):
        if role.trained or config.starts_engines:
            own = config.for_critic() if role.trained else config.for_worker(role)
            model = ModelRanks(own, placement, index, pad_token_id=pad_id)
            models[model.name] = model
    return models


@dataclass(frozen=True, slots=True)
class _Placed:
    """A run with reserved devices."""

    base: _Base
    metrics: MetricLogger
    progress: Progress
    timeline: Timeline | None
    placement: Placement
    run_name: str
    models: dict[str, ModelRanks]
    trained: Sequence[ModelRanks]
    checkpoints: CheckpointStore

    def launch(self) -> None:
        """Create all ranks. They import while other parts start."""
        self.base.stack.callback(self.checkpoints.abandon)  # runs after the trainers have ended
        for model in self.models.values():
            self.base.stack.callback(model.close)
            model.launch()

    def set_up_trained(self) -> None:
        """Wait for the ranks of the trained models, the policy's first. Models that share devices take turns."""
        for model in self.trained:
            with self.progress.waiting(f"{model.name} ranks", len(model)) as waiting, model.on_devices(starts=True):
                model.setup(waiting.on_waiting)

    def run(self, source: Source, devices: DeviceSwitch, pools: Sequence[RoleQueue] = ()) -> Run:
        """Build the opened run with its initial state. The trainers must be set up."""
        base, config = self.base, self.base.config
        interval = config.reference.update_interval if REFERENCE in config.roles else None
        reference = Reference(config.run_dir, interval, self.models[POLICY], pools)
        self.checkpoints.linked[REFERENCE] = reference.files
        run = Run(
            config=config,
            finished_steps=base.checkpoint.step if base.checkpoint is not None else 0,
            decode=partial(base.tokenizer.decode, clean_up_tokenization_spaces=False),
            source=source,
            models=self.models,
            devices=devices,
            reference=reference,
            kl_reward=KLCoefficient(config.algorithm.kl_reward),
            checkpoints=self.checkpoints,
            metrics=self.metrics,
            progress=self.progress,
            timeline=self.timeline,
        )
        if (checkpoint := base.checkpoint) is not None:
            self.checkpoints.newest = checkpoint
            source.restore(checkpoint)
            with self.progress.waiting("loading the checkpoint"):
                for model in self.trained:
                    with model.on_devices():
                        model.call("loading a checkpoint", TrainerRank.load, checkpoint.model(model.name))
                reference.restore(checkpoint)
            run.kl_reward.load_state_dict(checkpoint.state)
            self.progress.note(f"resumed from {checkpoint.path} after step {checkpoint.step}")
            if changed := base.directory.record_settings(checkpoint):
                self.progress.note(f"settings changed since the earlier start: {'; '.join(changed)}")
        return run


def data_notes(
    max_prompt_tokens: int, wanted: int, prompts: PromptSource, datasets: Mapping[str, Sequence[Prompt]] | None = None
) -> Iterator[str]:
    """Yield notes on prompts that are left out, repeated within a step, or also in the held-out ``datasets``."""
    yield from prompts.notes
    rows, dropped = prompts.num_rows, prompts.dropped_prompts
    if dropped:
        share = f"{dropped} of {rows + dropped} prompts ({dropped / (rows + dropped):.0%})"
        yield f"{share} are longer than data.max_prompt_tokens={max_prompt_tokens} and are left out"
    if rows < wanted:
        yield f"{pluralize(rows, 'row')} for rollout.prompts_per_step={wanted}: a step uses some rows more than once"
    for name, found in (datasets or {}).items():
        if shared := prompts.num_shared(found):
            different = len({tuple(prompt.input.token_ids) for prompt in found})
            yield f"{shared} of {pluralize(different, 'held-out prompt')} of {name} are also in the training data"


def settings_notes(config: RunConfig) -> Iterator[str]:
    """Warn about an adapter of another base, experts without factors, a warm-up that outlasts the run, an unset
    checkpoint interval, arguments of engines, and files that are not evaluated."""
    base, model = config.model.lora.base, config.model.path
    if base is not None and Path(base).resolve() != model.resolve():
        yield f"the adapter in model.lora.path names {base} as its base; its factors are added to model.path={model}"
    with suppress(WeightFilesError):  # a check reports it
        stored = header_shapes(model).items() if config.model.lora.is_set else ()
        if any(".experts." in name and len(shape) == 3 for name, shape in stored):
            yield "this model's experts have no factors (model.lora), so they stay as they are"
    updates, warmup = config.total_updates, config.trainer.optimizer.warmup_steps
    if warmup > updates:
        problem = f"is longer than the run ({pluralize(updates, 'update')}), which never reaches the learning rate"
        yield f"trainer.optimizer.warmup_steps={warmup} {problem}"
    if config.steps > 1 and "every" not in config.checkpoint.model_fields_set:
        remedy = "set checkpoint.every (0 if this is intended)"
        yield f"the only checkpoint is written after step {config.steps}, so a failure before loses all steps; {remedy}"
    if config.starts_engines:
        yield from engine_limits(config.rollout.engine).argument_notes(config.rollout)
    elif config.evaluation.files:
        yield "evaluation.files is not evaluated, because this run starts no engines; run `slime-like eval`"


def critic_note(checkpoint: Checkpoint | None, needs_critic: bool) -> str:
    """State that the run leaves out the checkpoint's critic; empty if it does not."""
    left = checkpoint is not None and not needs_critic and (checkpoint.path / CRITIC).is_dir()
    return "the checkpoint's critic is left out, because algorithm.advantage needs none" if left else ""


def router_note(model: Path, rate: float) -> str:
    """State whether biases of the model's routers change; empty without such biases."""
    dimensions = ModelDimensions.from_checkpoint(model)
    has_biases = dimensions.moe_sigmoid
    if dimensions.attention.unsupported:
        with suppress(WeightFilesError):  # there are none if the run starts with converted weights
            has_biases = any(map(is_router_bias, header_shapes(model)))
    if not has_biases:
        return ""
    fate = "move against the experts' load after each optimizer step" if rate else "are frozen"
    return f"the routers' biases {fate} (trainer.router_bias_rate={rate:g})"
