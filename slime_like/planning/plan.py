"""A whole cluster's run, worked out in this process: every kind of rank, engines, hosts, time, and what is wrong."""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import prod

from slime_like.checks.check import check_machine, check_settings
from slime_like.checks.definition import training_needs
from slime_like.checks.fsdp import BACKEND as FSDP
from slime_like.checks.layout import layout_problems
from slime_like.checks.model_directories import reference_problems
from slime_like.config import RunConfig
from slime_like.errors import CheckpointError, ConfigError, WeightSyncError
from slime_like.interfaces import TrainerBackend, load_backend
from slime_like.interfaces.estimate import RankEstimate, RankKind
from slime_like.models.dimensions import HEADS, ModelDimensions
from slime_like.models.weight_files import WeightFilesError
from slime_like.orchestration.reference.config import worker_config
from slime_like.planning import checks
from slime_like.planning.engines import plan_engine, share_setting
from slime_like.planning.hardware import GIB
from slime_like.planning.memory import REFERENCE_SCORING, engine_phase, host_memory, reference_phase, trainer_phases
from slime_like.planning.planned_run import PlannedRun
from slime_like.planning.result import KindPlan, Plan
from slime_like.planning.step_time import predict, reference_seconds, traffic_per_step
from slime_like.weights.transports.registry import transport_of

Note = Callable[[str], None]


def make_plan(run: PlannedRun, preflight: bool = False, note: Note = lambda _: None) -> Plan:
    """Plan ``run``. Problems are collected; nothing is raised for them.

    Args:
        preflight: this machine is one of the cluster's: files, disk and ports must be right here.
        note: receives progress messages.

    Raises:
        ConfigError: the backend is unknown or cannot be planned.
    """
    started, config = time.monotonic(), run.config
    backend = plannable_backend(config)
    dimensions = counted_dimensions(config, run.dimensions, backend)
    run = replace(run, dimensions=dimensions)
    plan = Plan(run.hardware, checks.planned_nodes(config), checks.gpus_needed(config).total)
    found = [*map(str, check_settings(config, dimensions, training_needs(config))), *backend.check(config)]
    found += reference_problems(config, dimensions)
    if _plans_references(config):
        of_workers = backend.check(worker_config(config))
        found += [problem.replace("trainer.parallel", "reference.parallel") for problem in of_workers]
    found += [*checks.placement_problems(config), *checks.version_problems()]
    plan.problems += dict.fromkeys(found)  # the configuration and the backend may find the same
    _judge_machine(plan, config, dimensions, preflight)
    if not layout_problems(config.trainer.parallel, dimensions):
        note("proving that every tensor has its place")
        _prove(plan, config, backend)
        _work_out(plan, run, backend, note)
        plan.problems += _misfits(plan, config)
    plan.seconds = time.monotonic() - started
    return plan


def counted_dimensions(
    config: RunConfig, dimensions: ModelDimensions, backend: type[TrainerBackend]
) -> ModelDimensions:
    """Add the counted parameters of a foreign model; others are returned unchanged.

    A token goes through everything but an embedding that is no head, and the experts it is routed to.
    """
    converter = getattr(backend, "converter", None)
    if dimensions.foreign is None or config.trainer.backend != FSDP or converter is None:
        return dimensions
    sizes = {name: prod(shape) for name, shape in converter().prove(config).items()}
    experts = sum(size for name, size in sizes.items() if ".experts." in name)
    active, outer = sum(sizes.values()), dimensions.vocab_size * dimensions.hidden_size
    if dimensions.num_experts:
        active -= experts * (dimensions.num_experts - dimensions.moe_top_k) // dimensions.num_experts
    if any(name in sizes for name in HEADS):
        active -= outer
    return replace(dimensions, counted=(sum(sizes.values()), active))


def _plans_references(config: RunConfig) -> bool:
    path = config.reference.path
    return config.reference_workers > 0 and (path is None or (path / "config.json").is_file())


def plannable_backend(config: RunConfig) -> type[TrainerBackend]:
    """The trainer of ``config``.

    Raises:
        ConfigError: it is unknown, or has no estimate of what it needs.
    """
    backend = load_backend(config.trainer.backend)
    if not hasattr(backend, "planner"):
        problem = f"trainer.backend={config.trainer.backend} cannot be planned: it has no estimate; plan with megatron"
        raise ConfigError(problem, code="backend-not-planned")
    return backend


def _judge_machine(plan: Plan, config: RunConfig, dimensions: ModelDimensions, preflight: bool) -> None:
    """Files, disk and ports: of this machine only where it is one of the cluster's."""
    found = map(str, check_machine(config, dimensions, training_needs(config)))
    lacking = [text for text in found if text not in plan.problems]
    if preflight:
        plan.problems += [*lacking, *checks.preflight_problems(config, dimensions)]
        return
    plan.notes += [f"not on this machine: {text}" for text in lacking]
    plan.notes.append(f"run_dir needs up to {checks.disk_bytes(config, dimensions) / 1e9:.0f} GB for checkpoints")


def _prove(plan: Plan, config: RunConfig, backend: type[TrainerBackend]) -> None:
    converter = getattr(backend, "converter", None)
    if converter is None or not hasattr(converter(), "prove"):
        plan.notes.append(f"trainer.backend={config.trainer.backend} proves no conversion: no tensor was checked")
        return
    try:
        expected = converter().prove(config)
    except CheckpointError as error:
        plan.problems.append(f"model.path={config.model.path}: {error}; the family's conversion rules do not cover it")
        return
    if not any(config.model.path.glob("*.safetensors")):
        plan.notes.append(f"{len(expected)} tensors convert without rest; no weights are there to compare them with")
        return
    try:
        wrong = list(checks.tensor_problems(config.model.path, expected))
    except WeightFilesError as error:
        wrong = [f"model.path={config.model.path}: {error}"]
    plan.problems += wrong
    if not wrong:
        plan.notes.append(f"{len(expected)} tensors convert without rest, and the files' headers have all of them")


def estimated_kinds(
    config: RunConfig, backend: type[TrainerBackend], kinds: Sequence[RankKind], note: Note = lambda _: None
) -> list[tuple[RankKind, RankEstimate]]:
    """Pair every kind with the estimate of its first rank."""
    found = []
    for kind in kinds:
        note(f"{kind.name}: {len(kind.ranks)} ranks")
        found.append((kind, backend.planner().estimate(config, kind.ranks[0])))
    return found


def _work_out(plan: Plan, run: PlannedRun, backend: type[TrainerBackend], note: Note) -> None:
    config, plan.workload = run.config, run.workload
    if not config.supervised and not config.debug.load_rollouts:
        plan.engine = plan_engine(run)
        try:
            plan.transport = transport_of(config, on_cuda=True, num_hosts=plan.nodes)
        except WeightSyncError as error:
            plan.problems.append(str(error))
    if _plans_references(config):
        _work_out_references(plan, config, backend, note)
    found = estimated_kinds(config, backend, backend.planner().rank_kinds(config), note)
    estimates = [estimate for _, estimate in found]
    for kind, estimate in found:
        phases = trainer_phases(run, plan.engine, kind, estimate)
        plan.kinds.append(KindPlan(kind, estimate, tuple(phases), tuple(traffic_per_step(run, estimate))))
    if plan.engine is not None and not run.colocated:
        plan.engine_phase = engine_phase(run, plan.engine)
    plan.host = host_memory(run, estimates, plan.engine, plan.transport)
    scoring = reference_seconds(run, [kind.estimate for kind in plan.references])
    plan.step = predict(run, estimates, plan.engine, plan.transport, scoring)


def _work_out_references(plan: Plan, config: RunConfig, backend: type[TrainerBackend], note: Note) -> None:
    """Plan the reference workers; none where their layout has a noted problem."""
    worker = worker_config(config)
    if layout_problems(worker.trainer.parallel, ModelDimensions.from_checkpoint(worker.model.path)):
        return
    kinds = [replace(kind, name=f"reference, {kind.name}") for kind in backend.planner().rank_kinds(worker)]
    for kind, estimate in estimated_kinds(worker, backend, kinds, note):
        phase = reference_phase(plan.hardware, kind, estimate)
        plan.references.append(KindPlan(kind, estimate, (phase,), ()))


def _misfits(plan: Plan, config: RunConfig) -> list[str]:
    """List what is too large, each with the settings that make it smaller."""
    problems = []
    for phase in plan.phases:
        if not phase.fits:
            largest = max(phase.items, key=lambda item: item.nbytes)
            cure = remedy(largest.name, config)
            if phase.phase == REFERENCE_SCORING:
                cure = cure.replace("trainer.parallel", "reference.parallel")
            problems.append(
                f"{phase.gpus}, {phase.phase}: {phase.total / GIB:.1f} GiB, {-phase.margin / GIB:.1f} more than the "
                f"GPU's {phase.capacity / GIB:.1f}; most of it is {largest.name}, {largest.nbytes / GIB:.1f} GiB: "
                f"{cure}"
            )
    if plan.engine is not None and plan.engine.longest_sequences < 1:
        problems.append(
            f"the KV cache of an engine holds {plan.engine.kv_tokens} tokens, not one sequence of "
            f"{config.max_model_len}; raise rollout.tensor or {share_setting(config)}, or lower rollout.max_model_len"
        )
    if plan.host is not None and not plan.host.fits and plan.host.capacity is not None:
        largest = max(plan.host.items, key=lambda item: item.nbytes)
        problems.append(
            f"host memory of a node: {plan.host.total / GIB:.1f} GiB, more than cluster.host_memory_gib="
            f"{plan.host.capacity / GIB:g}; most of it is {largest.name}, {largest.nbytes / GIB:.1f} GiB: "
            f"{host_remedy(largest.name)}"
        )
    return problems


def remedy(item: str, config: RunConfig) -> str:
    """Settings that make an item of the memory table smaller."""
    fsdp = config.trainer.backend == FSDP
    layout = "more trainer.parallel.data" if fsdp else "a larger trainer.parallel.tensor or pipeline"
    if item == "activations":
        less = [] if config.trainer.recompute == "full" else ["trainer.recompute: full"]
        return "use " + ", ".join([*less, "a smaller trainer.target_tokens_per_batch", "more trainer.parallel.context"])
    if item == "gradients" and fsdp and config.trainer.fsdp.accumulate != "sharded":
        return "use trainer.fsdp.accumulate: sharded"
    if item in ("optimizer state", "optimizer's temporaries beyond") and not fsdp:
        return f"use {layout}, more trainer.parallel.data with optimizer.distributed, or trainer.optimizer.offload"
    if item.endswith("(assumed)"):
        return "it does not depend on the run: use GPUs with more memory (cluster.gpu, cluster.gpu_memory_gib)"
    remedies = {
        "head": "lower trainer.head_chunk_tokens" + ("" if fsdp else ", or raise trainer.parallel.tensor"),
        "KV cache": f"lower {share_setting(config)}",
        "engine weights": "raise rollout.tensor",
        "sync buffers": "lower sync.bucket_mb, which cannot be less than one embedding, or use GPUs with more memory",
    }
    return remedies.get(item, f"use {layout}")


_HOST_REMEDIES = {
    "sync.delta": "use sync.delta: never",
    "trainers, while": "use cluster.placement: separate, or more trainer.parallel.pipeline",
    "engine weights": "use cluster.placement: separate, or more trainer.parallel.pipeline",
    "activations": "use trainer.recompute: full instead of trainer.activation_offload",
    "checkpoint.async_save": "use checkpoint.async_save: false",
    "weight buckets": "lower sync.bucket_mb",
    "Ray's object store": "lower cluster.object_store_mb",
}


def host_remedy(item: str) -> str:
    """Settings that make an item of a node's host memory smaller."""
    found = (remedy for begin, remedy in _HOST_REMEDIES.items() if item.startswith(begin))
    return next(found, "offload less, or raise trainer.parallel.pipeline")
