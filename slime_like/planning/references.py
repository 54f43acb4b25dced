"""Reference workers (``reference.placement: workers``): what their GPUs hold, and how long a step keeps them busy."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from slime_like.config import RunConfig
from slime_like.interfaces import TrainerBackend
from slime_like.interfaces.estimate import RankEstimate, RankKind
from slime_like.orchestration.reference.config import worker_config
from slime_like.orchestration.trainer.scoring import packs_per_request
from slime_like.planning.hardware import FRAGMENTATION, TRAINER_RESERVE_BYTES, Hardware
from slime_like.planning.memory import Item, PhaseMemory
from slime_like.planning.planned_run import PlannedRun
from slime_like.planning.step_time import pass_seconds

PHASE = "reference scoring"


def reference_kinds(config: RunConfig, backend: type[TrainerBackend]) -> list[RankKind]:
    """Kinds of one worker's ranks, numbered within the worker."""
    kinds = backend.planner().rank_kinds(worker_config(config))
    return [replace(kind, name=f"reference, {kind.name}") for kind in kinds]


def backend_problems(config: RunConfig, backend: type[TrainerBackend]) -> Iterator[str]:
    """List problems that the backend has with the workers but not with the trainers."""
    for problem in backend.check(worker_config(config)):
        yield problem.replace("trainer.parallel", "reference.parallel")


def reference_phase(hardware: Hardware, kind: RankKind, estimate: RankEstimate) -> PhaseMemory:
    """The GPU of one rank: weights and a pass without gradients; it makes neither gradients nor an optimizer."""
    memory = estimate.memory
    items = (
        Item("parameters", memory.parameter_bytes),
        Item("activations", memory.forward_bytes),
        Item("communication buffers", memory.communication_bytes),
        Item("fragmentation (assumed)", int(FRAGMENTATION * memory.forward_bytes)),
        Item("CUDA, NCCL (assumed)", TRAINER_RESERVE_BYTES),
    )
    return PhaseMemory(kind.name, PHASE, items, hardware.memory_bytes)


def reference_seconds(run: PlannedRun, estimates: Sequence[RankEstimate]) -> float:
    """A step's share of each worker, in requests that fill and empty a pipeline each; 0 without workers."""
    if not estimates:
        return 0.0
    trainer = worker_config(run.config).trainer
    layout, packs = trainer.parallel, packs_per_request(trainer)
    replicas = run.config.reference_workers * layout.data
    micro_batches = math.ceil(run.workload.samples / replicas / run.workload.per_micro_batch)
    slots = micro_batches * (packs + layout.pipeline - 1) / packs
    return slots * max(pass_seconds(run, one, one.forward) for one in estimates)
