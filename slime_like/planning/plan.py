"""A whole cluster's run, worked out in this process: every kind of rank, engines, hosts, time, and what is wrong."""

import time
from dataclasses import replace
from math import prod

from slime_like.checks.check import check_machine, check_settings
from slime_like.checks.definition import training_needs
from slime_like.checks.layout import layout_problems
from slime_like.checks.model_directories import reference_problems
from slime_like.checks.packages import rejected_on_cuda
from slime_like.checks.transport import chosen_transport
from slime_like.config import RunConfig
from slime_like.config.trainer import FSDP
from slime_like.errors import CheckpointError, ConfigError
from slime_like.interfaces import TrainerBackend
from slime_like.models.dimensions import HEADS, ModelDimensions
from slime_like.models.weight_files import WeightFilesError
from slime_like.orchestration.reference.config import worker_config
from slime_like.planning import checks
from slime_like.planning.engines import plan_engine
from slime_like.planning.estimates import Note, estimated_kinds, plannable_backend
from slime_like.planning.generation import predict_generation
from slime_like.planning.memory import engine_phase, host_memory, reference_phase, trainer_phases
from slime_like.planning.planned_run import PlannedRun
from slime_like.planning.recompute import chosen_recompute
from slime_like.planning.result import KindPlan, Plan
from slime_like.planning.step_time import predict, reference_seconds, traffic_per_step
from slime_like.planning.units import count_text, traffic_text
from slime_like.system.gpus import local_gpus


def make_plan(run: PlannedRun, preflight: bool = False, note: Note = lambda _: None) -> Plan:
    """Plan ``run``. Problems are collected; nothing is raised for them.

    Args:
        preflight: this machine is one of the cluster's: files, disk and ports must be right here.
        note: receives progress messages.

    Raises:
        ConfigError: the backend is unknown or cannot be planned.
    """
    started, backend = time.monotonic(), plannable_backend(run.config)
    config = chosen_recompute(run.config)
    dimensions = counted_dimensions(config, run.dimensions, backend)
    run = replace(run, config=config, dimensions=dimensions)
    plan = Plan(run.hardware, checks.planned_nodes(config), checks.gpus_needed(config).total, config.trainer.recompute)
    found = list(map(str, check_settings(config, dimensions, training_needs(config))))
    found += reference_problems(config, dimensions)
    plan.size_problems += checks.placement_problems(config)
    found += plan.size_problems
    if not preflight or local_gpus():  # a cluster of CPUs may run what is planned for GPUs
        found += rejected_on_cuda(config)
    plan.notes += checks.object_store_notes(config)
    plan.problems += dict.fromkeys(found)
    _judge_machine(plan, config, dimensions, preflight)
    if not layout_problems(config.trainer.parallel, dimensions):
        note("proving that every tensor has its place")
        _prove(plan, config, backend)
        _work_out(plan, run, backend, note)
        too_large = plan.misfits(config)
        plan.size_problems += too_large
        plan.problems += too_large
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


def _judge_machine(plan: Plan, config: RunConfig, dimensions: ModelDimensions, preflight: bool) -> None:
    """Files, disk and ports: of this machine only where it is one of the cluster's."""
    found = map(str, check_machine(config, dimensions, training_needs(config)))
    lacking = [text for text in found if text not in plan.problems]
    if preflight:
        plan.problems += [*lacking, *checks.preflight_problems(config, dimensions)]
        return
    plan.notes += [f"not on this machine: {text}" for text in lacking]
    plan.notes.append(f"run_dir needs up to {traffic_text(checks.disk_bytes(config, dimensions))} for checkpoints")


def _prove(plan: Plan, config: RunConfig, backend: type[TrainerBackend]) -> None:
    converter = getattr(backend, "converter", None)
    if converter is None or not hasattr(converter(), "prove"):
        plan.notes.append(f"trainer.backend={config.trainer.backend} has no conversion to check: no tensor was checked")
        return
    try:
        expected = converter().prove(config)
    except CheckpointError as error:
        plan.problems.append(f"model.path={config.model.path}: {error}; the family's conversion rules do not cover it")
        return
    if not any(config.model.path.glob("*.safetensors")):
        tensors = f"all {count_text(len(expected), 'tensor')} of this architecture map onto the ranks"
        plan.notes.append(f"{tensors}; no weight files here to check")
        return
    try:
        wrong = list(checks.tensor_problems(config.model.path, expected))
    except WeightFilesError as error:
        wrong = [f"model.path={config.model.path}: {error}"]
    plan.problems += wrong
    if not wrong:
        tensors = f"all {count_text(len(expected), 'tensor')} of this architecture map onto the ranks"
        plan.notes.append(f"{tensors}, and the weight files have all of them")


def _work_out(plan: Plan, run: PlannedRun, backend: type[TrainerBackend], note: Note) -> None:
    config, plan.workload = run.config, run.workload
    if not config.supervised and not config.debug.load_rollouts:
        plan.engine = plan_engine(run)
        try:
            plan.transport = chosen_transport(config, on_cuda=True, num_hosts=plan.nodes)
        except ConfigError as error:
            plan.problems.append(str(error))
    if _plans_references(config):
        _work_out_references(plan, config, backend, note)
    found = estimated_kinds(config, backend, backend.planner().rank_kinds(config), note)
    estimates = [estimate for _, estimate in found]
    for kind, estimate in found:
        phases = trainer_phases(run, plan.engine, kind, estimate)
        plan.kinds.append(KindPlan(kind, estimate, tuple(phases), tuple(traffic_per_step(run, estimate))))
    if plan.engine is not None:
        plan.generation = predict_generation(run, plan.engine)
        plan.engine_phase = None if run.colocated else engine_phase(run, plan.engine)
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
