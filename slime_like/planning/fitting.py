"""Settings with which a run fits its GPUs that does not fit as it is: found by planning, one change after the other."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import floor

from slime_like.checks.engine_arguments import SHARES
from slime_like.checks.fsdp import BACKEND as FSDP
from slime_like.checks.layout import divisors, layout_problems
from slime_like.config import ParallelConfig
from slime_like.interfaces import TrainerBackend
from slime_like.orchestration.cluster.bundles import num_reference_ranks
from slime_like.planning import checks
from slime_like.planning.bounds import least_bytes
from slime_like.planning.engines import engine_share, plan_engine, share_setting
from slime_like.planning.estimates import Note, end_kinds, estimated_kinds, plannable_backend
from slime_like.planning.hardware import SLEEPING_ENGINE_BYTES, TRAINER_RESERVE_BYTES
from slime_like.planning.memory import (
    ENGINES,
    GENERATION,
    WEIGHT_SYNC,
    PhaseMemory,
    engine_phase,
    received_bytes,
    trainer_phases,
)
from slime_like.planning.planned_run import PlannedRun
from slime_like.planning.settings import Changes, changed

_LEAST_CHUNK = 64
_LEAST_FREE = 2**29
"""Bytes that a proposed share of an engine leaves beside all else."""


@dataclass(frozen=True, slots=True)
class Fitting:
    """Changes with which GPU memory suffices; or the phase that is still too large when nothing is left to change."""

    changes: Changes
    too_large: PhaseMemory | None = None


def find_fitting(run: PlannedRun, note: Note = lambda _: None) -> Fitting:
    """Fewer GPUs if there are fewer, a share for engines that fits, then settings that save the trainer's memory.

    FSDP comes last: it keeps weights and gradients in host memory as well, and moves them in every pass.
    """
    layout = layout_changes(run)
    base = {**layout, **share_changes(changed(run, layout))}
    start = changed(run, base)
    sharded = fsdp_changes(start)
    if start.config.trainer.backend != FSDP and sharded and _cannot_fit(start):
        found = Fitting({}, None)
    else:
        found = _saving_memory(start, note)
        if found.too_large is None or _only_engines(found.too_large) or not sharded:
            return Fitting({**base, **found.changes}, found.too_large)
    found = _saving_memory(changed(start, sharded), note)
    return Fitting({**base, **sharded, **found.changes}, found.too_large)


def _saving_memory(run: PlannedRun, note: Note) -> Fitting:
    """Add settings, from those that cost no time to those that cost most, until all phases fit; take back what turns
    out unnecessary."""
    backend = plannable_backend(run.config)
    added: dict[str, str] = {}
    ladder = memory_changes(run)
    while (worst := _too_large(changed(run, added), backend, note)) is not None:
        name, value = next(ladder, ("", ""))
        if not name or _only_engines(worst) or _has_weights_alone(run, worst):
            return Fitting(added, worst)
        added[name] = value
    for name in list(added)[:-1]:
        fewer = {key: value for key, value in added.items() if key != name}
        tried = changed(run, fewer)
        if least_bytes(tried) < run.hardware.memory_bytes and _too_large(tried, backend, note) is None:
            added = fewer
    return Fitting(added)


def _too_large(run: PlannedRun, backend: type[TrainerBackend], note: Note) -> PhaseMemory | None:
    """The phase that exceeds a GPU's memory most, if one does."""
    trainer = run.config.trainer
    note(f"trying recompute {trainer.recompute}, {trainer.target_tokens_per_batch} tokens per micro-batch")
    engine = plan_engine(run) if run.has_engines else None
    phases = [] if engine is None or run.colocated else [engine_phase(run, engine)]
    for kind, estimate in estimated_kinds(run.config, backend, end_kinds(run.config, backend)):
        phases += trainer_phases(run, engine, kind, estimate)
    worst = min(phases, key=lambda phase: phase.margin)
    return None if worst.fits else worst


def _only_engines(phase: PhaseMemory) -> bool:
    """The trainer's part of the phase is nothing that settings change."""
    return phase.gpus == ENGINES or phase.phase == GENERATION


def _has_weights_alone(run: PlannedRun, phase: PhaseMemory) -> bool:
    """Of the trainer there are weights, which Megatron keeps whole."""
    return run.colocated and phase.phase == WEIGHT_SYNC and run.config.trainer.backend != FSDP


def memory_changes(run: PlannedRun) -> Iterator[tuple[str, str]]:
    """Settings that save a trainer's memory, those first that cost least time."""
    config, trainer = run.config, run.config.trainer
    fsdp, alone = trainer.backend == FSDP, trainer.parallel.world_size == 1
    longest = config.longest_row
    if trainer.recompute != "full":
        yield "trainer.recompute", "full"
    if trainer.target_tokens_per_batch > longest:
        yield "trainer.target_tokens_per_batch", str(longest)
    if trainer.head_chunk_tokens is None or trainer.head_chunk_tokens > _LEAST_CHUNK:
        yield "trainer.head_chunk_tokens", str(_LEAST_CHUNK)
    sharded = fsdp and trainer.fsdp.accumulate != "sharded"
    if sharded and not alone:
        yield "trainer.fsdp.accumulate", "sharded"
    if not trainer.optimizer.offload and trainer.optimizer.distributed and config.model.dtype != "float32":
        yield "trainer.optimizer.offload", "true"
    if sharded and alone:  # there gradients are only moved to host memory, with the optimizer's state
        yield "trainer.fsdp.accumulate", "sharded"
    if not trainer.activation_offload and not fsdp:
        yield "trainer.activation_offload", "true"


def fsdp_changes(run: PlannedRun) -> Changes:
    """FSDP on the same ranks with everything in host memory; none where it does not take this run, or has it."""
    parallel, trainer = run.config.trainer.parallel, run.config.trainer
    if trainer.backend == FSDP or trainer.attention not in ("auto", "allgather", "ring_flash_attn"):
        return {}
    wanted = ParallelConfig(data=parallel.data * parallel.tensor * parallel.pipeline, context=parallel.context)
    changes = _different(parallel, wanted) | {
        "trainer.backend": FSDP,
        "trainer.fsdp.accumulate": "sharded",
        "trainer.optimizer.offload": "true",
    }
    if trainer.activation_offload:
        changes["trainer.activation_offload"] = "false"
    sharded = changed(run, changes).config
    return {} if plannable_backend(sharded).check(sharded) else changes


def _cannot_fit(run: PlannedRun) -> bool:
    """No setting that saves memory is enough for Megatron: weights and gradients alone are too large."""
    saving = changed(run, dict(memory_changes(run)))
    beside = TRAINER_RESERVE_BYTES + (SLEEPING_ENGINE_BYTES if run.colocated and run.has_engines else 0)
    return least_bytes(saving) + beside > run.hardware.memory_bytes


def _different(now: ParallelConfig, wanted: ParallelConfig) -> dict[str, str]:
    return {
        f"trainer.parallel.{name}": str(value).lower()
        for name, value in wanted.model_dump().items()
        if value != getattr(now, name)
    }


def share_changes(run: PlannedRun) -> Changes:
    """As much memory for engines as is left beside what stays on their GPUs, where they would take more."""
    config, memory = run.config, run.hardware.memory_bytes
    if not run.has_engines or config.rollout.engine not in SHARES:
        return {}
    beside = TRAINER_RESERVE_BYTES if run.colocated else received_bytes(run)
    share, largest = engine_share(config), floor(100 * (memory - beside - _LEAST_FREE) / memory) / 100
    if share * memory + beside <= memory and plan_engine(run).longest_sequences:
        return {}
    return {share_setting(config): f"{largest:g}"} if largest > 0 else {}


def layout_changes(run: PlannedRun) -> Changes:
    """A layout of the GPUs that there are, which trainers and engines share; none where all find a place."""
    config, nodes = run.config, run.config.cluster.nodes
    if nodes is None or checks.gpus_needed(config).total <= (gpus := nodes * config.cluster.gpus_per_node):
        return {}
    parallel, rollout = config.trainer.parallel, config.rollout
    replica = parallel.world_size // parallel.data
    if replica <= gpus:
        wanted = parallel.model_copy(update={"data": min(gpus // replica, parallel.data)})
    else:
        wanted = _smaller_replica(run, gpus)
    changes = _different(parallel, wanted)
    if not run.has_engines:
        return changes
    tensor = max(size for size in divisors(rollout.tensor) if size <= wanted.world_size)
    engines = min(rollout.num_engines, wanted.world_size // tensor)
    shared: dict[str, tuple[object, object]] = {
        "cluster.placement": (config.cluster.placement, "colocated"),
        "rollout.num_engines": (rollout.num_engines, engines),
        "rollout.tensor": (rollout.tensor, tensor),
        "rollout.max_staleness": (rollout.max_staleness, 0),
        "rollout.stream": (rollout.stream, False),
    }
    if num_reference_ranks(config):
        shared["reference.placement"] = ("workers", "trainer")
    if config.sync.transport == "nccl":
        shared["sync.transport"] = ("nccl", "auto")
    return changes | {name: str(new).lower() for name, (old, new) in shared.items() if new != old}


def _smaller_replica(run: PlannedRun, gpus: int) -> ParallelConfig:
    """The largest tensor parallelism that the GPUs and the model admit, and no other axis but data."""
    for tensor in reversed(divisors(run.config.cluster.gpus_per_node)):
        data = gpus // tensor
        parallel = ParallelConfig(tensor=tensor, sequence=tensor > 1, data=max(1, data))
        if data and not layout_problems(parallel, run.dimensions):
            return parallel
    return ParallelConfig()
