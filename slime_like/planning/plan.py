"""The plan of a whole cluster's run: every kind of rank, engines, hosts, time, and all problems."""

import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from math import prod
from typing import Any

from slime_like.checks import training_needs
from slime_like.checks.check import check, check_settings
from slime_like.checks.engines import chosen_transport
from slime_like.checks.layout import layout_problems
from slime_like.checks.model_directories import frozen_problems
from slime_like.checks.packages import cpu_only_settings
from slime_like.config import RunConfig
from slime_like.config.filling import gpus_needed
from slime_like.config.roles import CRITIC, POLICY
from slime_like.config.trainer import FSDP
from slime_like.errors import CheckpointError, ConfigError
from slime_like.interfaces import TrainerBackend
from slime_like.interfaces.estimate import RankEstimate, RankKind
from slime_like.models.dimensions import HEADS, ModelDimensions
from slime_like.models.weight_files import WeightFilesError
from slime_like.planning import checks, memory, step_time
from slime_like.planning.generation import GenerationTime, predict_generation
from slime_like.planning.planned_run import Note, PlannedRun, estimate_kinds, plannable_backend
from slime_like.planning.search import fill_memory
from slime_like.system.gpus import local_gpus
from slime_like.system.words import memory_text, traffic_text

_CURE = "docs/tuning.md lists the settings that lower it, and slime-like plan --search the layouts that fit"

_ACCUMULATE = "set trainer.fsdp.accumulate=sharded, or leave it at auto, so a rank keeps only its shard of gradients"


@dataclass(frozen=True, slots=True)
class KindPlan:
    """One kind of ranks: the estimate of one of them, and its memory by phase."""

    kind: RankKind
    estimate: RankEstimate
    phases: tuple[memory.PhaseMemory, ...]


@dataclass(slots=True)
class Plan:
    """Result of ``slime-like plan``.

    Attributes:
        run: the planned run, with the chosen number of recomputed layers.
        kinds, references: every kind of rank of the trainer, and of roles' workers; empty without workers, or if the
            layout itself is rejected.
        engine_phase: contents of a separate engine's GPU.
        problems: reasons why the run cannot start on this cluster, each with a remedy.
        notes: facts that could not be checked here, or are worth knowing.
        seconds: duration of planning.
    """

    run: PlannedRun
    nodes: int
    gpus_in_use: int
    kinds: list[KindPlan] = field(default_factory=list)
    references: list[KindPlan] = field(default_factory=list)
    engine: memory.EnginePlan | None = None
    engine_phase: memory.PhaseMemory | None = None
    generation: GenerationTime | None = None
    host: memory.NodeMemory | None = None
    step: step_time.StepTime | None = None
    transport: str | None = None
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def phases(self) -> list[memory.PhaseMemory]:
        phases = [phase for kind in (*self.kinds, *self.references) for phase in kind.phases]
        return phases + ([self.engine_phase] if self.engine_phase is not None else [])

    @property
    def fits(self) -> bool:
        """True if GPU memory suffices, including a KV cache for one sequence of the maximum length."""
        holds_one = self.engine is None or self.engine.longest_sequences > 0
        return holds_one and all(phase.fits for phase in self.phases)

    def misfits(self) -> Iterator[str]:
        config = self.run.config
        for phase in self.phases:
            if not phase.fits:
                needed, missing = memory_text(phase.total), memory_text(-phase.margin)
                more = f"{missing} more than the GPU's {memory_text(phase.capacity)}"
                cure = _ACCUMULATE if self._sharding_helps(phase) else _CURE
                yield f"GPU memory, {phase.place}: {needed} are needed, {more}; {_largest(phase.items)}; {cure}"
        if self.engine is not None and self.engine.longest_sequences < 1:
            holds = f"an engine's KV cache holds {self.engine.kv_tokens:,} tokens, less than one sequence"
            yield f"rollout.max_model_len={config.max_model_len}: {holds}; {_CURE}"
        if self.host is not None and not self.host.fits:
            needed = f"a node needs {memory_text(self.host.total)} of host memory; {_largest(self.host.items)}"
            yield f"cluster.host_memory_gib={config.cluster.host_memory_gib:g}: {needed}; {_CURE}"

    def _sharding_helps(self, phase: memory.PhaseMemory) -> bool:
        """Return whether the phase would fit if FSDP's ranks kept only their shard of gradients."""
        trainer = self.run.config.trainer
        whole = phase.items.get("gradients", 0) if phase.phase == memory.TRAINING else 0
        return (
            trainer.backend == FSDP
            and trainer.fsdp.accumulate == "whole"
            and whole * (1 - 1 / trainer.parallel.world_size) > -phase.margin
        )

    def to_json(self) -> dict[str, Any]:
        """Convert to JSON values, with sums and verdicts."""
        written = asdict(self)
        run = written.pop("run")
        written |= {name: run[name] for name in ("hardware", "workload")}
        written["workload"]["mean_response"] = self.run.workload.mean_response
        written["recompute"] = self.run.config.trainer.recompute
        entries = [entry for kind in (*written["kinds"], *written["references"]) for entry in kind["phases"]]
        entries += [written["engine_phase"]] if self.engine_phase is not None else []
        for entry, phase in zip(entries, self.phases, strict=True):
            entry |= {"total": phase.total, "margin": phase.margin, "fits": phase.fits}
        if self.host is not None:
            checked = {"fits": self.host.fits} if self.host.capacity is not None else {}
            written["host"] |= {"total": self.host.total, **checked}
        if self.step is not None:
            written["step"]["total"] = self.step.total
        return {"verdict": "does not fit" if self.problems else "fits", **written}


def _largest(items: dict[str, int]) -> str:
    name, nbytes = max(items.items(), key=lambda item: item[1])
    return f"most of it is {name}, {memory_text(nbytes)}"


def make_plan(run: PlannedRun, preflight: bool = False, note: Note = lambda _: None) -> Plan:
    """Plan ``run``. Problems are collected, not raised.

    Args:
        preflight: this machine is part of the cluster, so its files, disk and port are checked.
        note: receiver of progress messages.

    Raises:
        ConfigError: the backend is unknown or cannot be planned.
    """
    started, backend = time.monotonic(), plannable_backend(run.config.trainer.backend)
    config = fill_memory(run.config)
    dimensions, needs = count_parameters(config, run.dimensions, backend), training_needs(config)
    run = replace(run, config=config, dimensions=dimensions)
    needed = gpus_needed(config)
    nodes = config.cluster.nodes or needed.nodes(config.cluster.gpus_per_node)
    plan = Plan(run, nodes, needed.total)
    found = [*map(str, check_settings(config, dimensions, needs)), *frozen_problems(config, dimensions)]
    found += [*checks.placement_problems(config), *checks.gpu_problems(config)]
    if not preflight or local_gpus():  # CPUs may run a recipe that is planned for GPUs
        found += cpu_only_settings(config.model)
    plan.problems += dict.fromkeys(found)
    plan.notes += checks.object_store_notes(config.cluster, checks.largest_batch_bytes(config))
    plan.notes += checks.idle_engine_notes(config)
    on_machine = [text for text in map(str, check(config, needs - {"code"})) if text not in plan.problems]
    trained = run.factors or dimensions.num_parameters
    if config.algorithm.needs_critic and (config.for_critic().model.path / "config.json").is_file():
        trained += run.for_critic().dimensions.num_parameters
    disk = checks.disk_bytes(config.checkpoint, config.model.dtype, trained, config.steps)
    if preflight:
        plan.problems += [*on_machine, *checks.preflight_problems(config.run_dir, disk, config.trainer.rendezvous_port)]
    else:
        plan.notes += [f"not on this machine: {text}" for text in on_machine]
        plan.notes.append(f"run_dir needs up to {traffic_text(disk)} for checkpoints")
    if not layout_problems(config.trainer.parallel, dimensions):
        note("checking that every tensor has a place")
        _check_tensors(plan, backend)
        _estimate_run(plan, backend, note)
        plan.problems += plan.misfits()
    plan.seconds = time.monotonic() - started
    return plan


def count_parameters(config: RunConfig, dimensions: ModelDimensions, backend: type[TrainerBackend]) -> ModelDimensions:
    """Add the counted parameters of a model without formulas; return other dimensions unchanged.

    A token uses all parameters except an embedding that is not also the head, and the experts it is not routed to.
    """
    converter = getattr(backend, "converter", None)
    if dimensions.attention.unsupported is None or config.trainer.backend != FSDP or converter is None:
        return dimensions
    sizes = {name: prod(shape) for name, shape in converter(config.model, config.trainer).prove().items()}
    experts = sum(size for name, size in sizes.items() if ".experts." in name)
    active, outer = sum(sizes.values()), dimensions.vocab_size * dimensions.hidden_size
    if dimensions.num_experts:
        active -= experts * (dimensions.num_experts - dimensions.moe_top_k) // dimensions.num_experts
    if any(name in sizes for name in HEADS):
        active -= outer
    return replace(dimensions, counted=(sum(sizes.values()), active))


def _check_tensors(plan: Plan, backend: type[TrainerBackend]) -> None:
    """Check that conversion covers every tensor of the architecture, and that the weight files contain them."""
    config, make = plan.run.config, getattr(backend, "converter", None)
    path, converter = config.model.path, make and make(config.model, config.trainer)
    if converter is None or not hasattr(converter, "prove"):
        plan.notes.append(f"trainer.backend={config.trainer.backend} has no conversion to check: no tensor was checked")
        return
    try:
        expected = converter.prove()
    except CheckpointError as error:
        plan.problems.append(f"model.path={path}: {error}; the family's conversion rules do not cover it")
        return
    weights, wrong = "no weight files here to check", list[str]()
    if any(path.glob("*.safetensors")):
        weights = "the weight files contain all of them"
        try:
            wrong += checks.tensor_problems(path, expected)
        except WeightFilesError as error:
            wrong = [f"model.path={path}: {error}"]
    plan.problems += wrong
    if not wrong:
        plan.notes.append(f"all {len(expected)} tensors of this architecture map onto the ranks; {weights}")


def _estimate_run(plan: Plan, backend: type[TrainerBackend], note: Note) -> None:
    """Add the memory and the time of engines, workers, trainer ranks, critic and hosts to the plan."""
    run, config = plan.run, plan.run.config
    if config.starts_engines:
        plan.engine = memory.plan_engine(run)
        plan.generation = predict_generation(run, plan.engine)
        plan.engine_phase = None if run.colocated else memory.engine_phase(run, plan.engine)
        try:
            plan.transport = chosen_transport(config, on_cuda=True, num_hosts=plan.nodes)
        except ConfigError as error:
            plan.problems.append(str(error))
    references = 0.0
    for role in config.roles.with_workers:
        if found := _estimate_role(config.for_worker(role), role.name, backend, note):
            phases = [memory.worker_phase(run.hardware, role.name, kind, one) for kind, one in found]
            plan.references += [KindPlan(*pair, (phase,)) for pair, phase in zip(found, phases, strict=True)]
            references = max(references, step_time.worker_seconds(run, role, [one for _, one in found]))
    kinds = estimate_kinds(config, backend, backend.planner().rank_kinds(config.trainer), note)
    plan.kinds += [
        KindPlan(kind, one, tuple(memory.trainer_phases(run, plan.engine, kind, one))) for kind, one in kinds
    ]
    critics: list[RankEstimate] = []
    critic_s = 0.0
    if config.algorithm.needs_critic and (found := _estimate_role(config.for_critic(), CRITIC, backend, note, CRITIC)):
        critic, engine = run.for_critic(), plan.engine if config.critic.placement == "shared" else None
        plan.references += [KindPlan(*pair, tuple(memory.trainer_phases(critic, engine, *pair)[:1])) for pair in found]
        critics = [one for _, one in found]
        critic_s = step_time.critic_seconds(critic, critics)
    estimates = [one for _, one in kinds]
    plan.host = memory.host_memory(run, estimates, plan.engine, plan.transport, critics)
    plan.step = step_time.predict_step(run, estimates, plan.engine, plan.transport, references, critic_s)


def _estimate_role(
    config: RunConfig, name: str, backend: type[TrainerBackend], note: Note, role: str = POLICY
) -> list[tuple[RankKind, RankEstimate]]:
    """Estimate a worker's or the critic's ranks. Return none if a check rejects their model or their layout."""
    path, layout = config.model.path, config.trainer.parallel
    if not (path / "config.json").is_file():
        return []
    if layout_problems(layout, ModelDimensions.from_checkpoint(path, values=role == CRITIC)):
        return []
    kinds = [replace(kind, name=f"{name}, {kind.name}") for kind in backend.planner().rank_kinds(config.trainer)]
    return estimate_kinds(config, backend, kinds, note, role)
