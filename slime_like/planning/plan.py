"""A whole cluster's run, planned in this process: every kind of rank, engines, hosts, time, and all problems."""

import time
from dataclasses import replace
from math import prod

from slime_like.checks.check import check, check_settings
from slime_like.checks.definition import training_needs
from slime_like.checks.layout import layout_problems
from slime_like.checks.model_directories import frozen_problems
from slime_like.checks.packages import rejected_on_cuda
from slime_like.checks.transport import chosen_transport
from slime_like.config import RunConfig
from slime_like.config.filling import gpus_needed
from slime_like.config.roles import CRITIC, ModelRole
from slime_like.config.trainer import FSDP
from slime_like.errors import CheckpointError, ConfigError
from slime_like.interfaces import TrainerBackend
from slime_like.interfaces.estimate import RankEstimate
from slime_like.models.dimensions import HEADS, ModelDimensions
from slime_like.models.weight_files import WeightFilesError
from slime_like.planning import checks
from slime_like.planning.engines import plan_engine, predict_generation
from slime_like.planning.memory import engine_phase, host_memory, trainer_phases, worker_phase
from slime_like.planning.planned_run import Note, PlannedRun, estimated_kinds, plannable_backend
from slime_like.planning.recompute import chosen_recompute
from slime_like.planning.result import KindPlan, Plan
from slime_like.planning.step_time import critic_seconds, predict, worker_seconds
from slime_like.planning.units import traffic_text
from slime_like.system.gpus import local_gpus


def make_plan(run: PlannedRun, preflight: bool = False, note: Note = lambda _: None) -> Plan:
    """Plan ``run``. Problems are collected, not raised.

    Args:
        preflight: this machine is part of the cluster, so its files, disk and port are checked.
        note: receiver of progress messages.

    Raises:
        ConfigError: the backend is unknown or cannot be planned.
    """
    started, backend = time.monotonic(), plannable_backend(run.config.trainer.backend)
    config = chosen_recompute(run.config)
    dimensions, needs = counted_dimensions(config, run.dimensions, backend), training_needs(config)
    run = replace(run, config=config, dimensions=dimensions)
    needed = gpus_needed(config)
    nodes = config.cluster.nodes or needed.nodes(config.cluster.gpus_per_node)
    plan = Plan(run, nodes, needed.total)
    found = [*map(str, check_settings(config, dimensions, needs)), *frozen_problems(config, dimensions)]
    found += checks.placement_problems(config)
    if not preflight or local_gpus():  # CPUs may run a recipe that is planned for GPUs
        found += rejected_on_cuda(config.model)
    plan.problems += dict.fromkeys(found)
    plan.notes += checks.object_store_notes(config.cluster, checks.largest_batch_bytes(config))
    plan.notes += checks.idle_engine_notes(config)
    on_machine = [text for text in map(str, check(config, needs - {"code"})) if text not in plan.problems]
    trained = run.factors or dimensions.num_parameters
    if config.algorithm.needs_critic and (config.for_critic().model.path / "config.json").is_file():
        trained += run.for_critic().dimensions.num_parameters
    disk = checks.disk_bytes(config.checkpoint, config.model.dtype, trained)
    if preflight:
        plan.problems += [*on_machine, *checks.preflight_problems(config.run_dir, disk, config.trainer.rendezvous_port)]
    else:
        plan.notes += [f"not on this machine: {text}" for text in on_machine]
        plan.notes.append(f"run_dir needs up to {traffic_text(disk)} for checkpoints")
    if not layout_problems(config.trainer.parallel, dimensions):
        note("checking that every tensor has a place")
        _check_tensors(plan, backend)
        _work_out(plan, backend, note)
        plan.problems += plan.misfits()
    plan.seconds = time.monotonic() - started
    return plan


def counted_dimensions(
    config: RunConfig, dimensions: ModelDimensions, backend: type[TrainerBackend]
) -> ModelDimensions:
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


def _work_out(plan: Plan, backend: type[TrainerBackend], note: Note) -> None:
    run, config = plan.run, plan.run.config
    if config.starts_engines:
        plan.engine = plan_engine(run)
        plan.generation = predict_generation(run, plan.engine)
        plan.engine_phase = None if run.colocated else engine_phase(run, plan.engine)
        try:
            plan.transport = chosen_transport(config, on_cuda=True, num_hosts=plan.nodes)
        except ConfigError as error:
            plan.problems.append(str(error))
    seconds = [_work_out_workers(plan, role, backend, note) for role in config.roles.with_workers]
    found = estimated_kinds(config, backend, backend.planner().rank_kinds(config.trainer), note)
    estimates = [estimate for _, estimate in found]
    plan.kinds += [KindPlan(kind, one, tuple(trainer_phases(run, plan.engine, kind, one))) for kind, one in found]
    critic = _work_out_critic(plan, backend, note) if config.algorithm.needs_critic else []
    plan.host = host_memory(run, estimates, plan.engine, plan.transport, critic)
    critics = critic_seconds(run.for_critic(), critic) if critic else 0.0
    plan.step = predict(run, estimates, plan.engine, plan.transport, max(seconds, default=0.0), critics)


def _work_out_critic(plan: Plan, backend: type[TrainerBackend], note: Note) -> list[RankEstimate]:
    """Plan the critic's ranks. Return their estimates; none if its model or layout has a problem, told elsewhere."""
    path, layout = plan.run.config.for_critic().model.path, plan.run.config.roles[CRITIC].parallel
    if not (path / "config.json").is_file() or layout_problems(layout, ModelDimensions.from_checkpoint(path, True)):
        return []
    run, is_shared = plan.run.for_critic(), plan.run.config.critic.placement == "shared"
    kinds = [replace(kind, name=f"critic, {kind.name}") for kind in backend.planner().rank_kinds(run.config.trainer)]
    found = estimated_kinds(run.config, backend, kinds, note, CRITIC)
    for kind, estimate in found:
        phases = trainer_phases(run, plan.engine if is_shared else None, kind, estimate)[:1]
        plan.references.append(KindPlan(kind, estimate, tuple(phases)))
    return [estimate for _, estimate in found]


def _work_out_workers(plan: Plan, role: ModelRole, backend: type[TrainerBackend], note: Note) -> float:
    """Plan a role's workers. Return their seconds, 0 if their model or layout has a problem, reported elsewhere."""
    run, worker = plan.run, plan.run.config.for_worker(role)
    path = worker.model.path
    if not (path / "config.json").is_file() or layout_problems(role.parallel, ModelDimensions.from_checkpoint(path)):
        return 0.0
    kinds = [replace(kind, name=f"{role.name}, {kind.name}") for kind in backend.planner().rank_kinds(worker.trainer)]
    found = estimated_kinds(worker, backend, kinds, note)
    for kind, estimate in found:
        plan.references.append(KindPlan(kind, estimate, (worker_phase(run.hardware, role.name, kind, estimate),)))
    return worker_seconds(run, role, [estimate for _, estimate in found])
