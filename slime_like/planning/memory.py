"""Contents of a GPU's memory, phase by phase, and whether they fit."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from slime_like.checks.engine_arguments import can_keep_weights
from slime_like.interfaces.estimate import RankEstimate, RankKind, TrainerMemory
from slime_like.planning.engines import EnginePlan
from slime_like.planning.hardware import FRAGMENTATION, Hardware
from slime_like.planning.planned_run import PlannedRun
from slime_like.weights.transports.registry import use_delta
from slime_like.weights.transports.shared_memory import NAME as SHARED_MEMORY

REFERENCE_SCORING = "reference scoring"
"""The phase of reference workers."""

_ONLY_KIND = re.compile(r"(, )?(stage 1 of 1|all ranks)$")
"""Names of a kind of ranks that is the only one."""

TRAINING = "training"
GENERATION, WEIGHT_SYNC = "generation", "weight sync"
"""Phases in which engines are awake."""

ENGINES = "engines"
"""GPUs of engines that have their own."""

ENGINE_RESERVE = "engine's reserve (assumed)"
ACTIVATIONS, HEAD = "activations", "head"
OPTIMIZER_STEP = "optimizer step's temporaries"


@dataclass(frozen=True, slots=True)
class Item:
    """One line of a sum, in bytes."""

    name: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class PhaseMemory:
    """Contents of one GPU in one phase of a step: of a kind of trainer ranks, or of engines."""

    gpus: str
    phase: str
    items: tuple[Item, ...]
    capacity: int

    @property
    def total(self) -> int:
        return sum(item.nbytes for item in self.items)

    @property
    def margin(self) -> int:
        """Bytes left; below 0 it does not fit."""
        return self.capacity - self.total

    @property
    def fits(self) -> bool:
        return self.margin >= 0

    @property
    def kind(self) -> str:
        """Which GPUs; "" where the trainer's are all alike."""
        return _ONLY_KIND.sub("", self.gpus)

    @property
    def place(self) -> str:
        """The phase, and which GPUs."""
        return f"{self.phase}, {self.kind}" if self.kind and self.kind not in self.phase else self.phase


def trainer_phases(
    run: PlannedRun, engine: EnginePlan | None, kind: RankKind, estimate: RankEstimate
) -> list[PhaseMemory]:
    """The GPU of one kind of trainer ranks, with the engine's share where they are colocated."""
    config, shared = run.config, engine if run.colocated else None
    sleeping = [Item("sleeping engine (assumed)", shared.sleeping_bytes)] if shared is not None else []
    reserve = _trainer_reserve(estimate)
    memory = estimate.memory
    training = replace(memory, gradient_bytes=memory.gradient_bytes + memory.window_gradient_bytes)
    found = [(TRAINING, [*_state(training), *_training(memory), *sleeping, reserve])]
    if config.reference_in_trainer or config.algorithm.scores_policy:
        found.append(("scoring", [*_state(memory), *_scoring(memory, config.reference_in_trainer), *sleeping, reserve]))
    weights = Item("parameters", memory.parameter_bytes)
    sync = Item("sync buffers", _sending_bytes(run) + (bucket_bytes(run) if shared is not None else 0))
    if shared is not None:
        engine_weights = [Item("engine weights", shared.weight_bytes), Item(ENGINE_RESERVE, shared.reserve_bytes)]
        found.append((WEIGHT_SYNC, [weights, sync, *engine_weights, reserve]))
        found.append((GENERATION, [*engine_weights, Item("KV cache", max(0, shared.kv_bytes)), reserve]))
    elif engine is not None:
        found.append((WEIGHT_SYNC, [*_state(memory), sync, reserve]))
    return [PhaseMemory(kind.name, phase, tuple(items), run.hardware.memory_bytes) for phase, items in found]


def engine_phase(run: PlannedRun, engine: EnginePlan) -> PhaseMemory:
    """The GPU of an engine that has it for itself."""
    items = (
        Item("engine weights", engine.weight_bytes),
        Item("KV cache", max(0, engine.kv_bytes)),
        Item("sync buffers", received_bytes(run)),
        Item(ENGINE_RESERVE, engine.reserve_bytes),
    )
    return PhaseMemory(ENGINES, GENERATION, items, run.hardware.memory_bytes)


def reference_phase(hardware: Hardware, kind: RankKind, estimate: RankEstimate) -> PhaseMemory:
    """The GPU of a reference worker's rank: weights and a pass without gradients; it has no optimizer."""
    weights = Item("parameters", estimate.memory.parameter_bytes)
    items = (weights, *_scoring(estimate.memory), _trainer_reserve(estimate))
    return PhaseMemory(kind.name, REFERENCE_SCORING, items, hardware.memory_bytes)


def received_bytes(run: PlannedRun) -> int:
    """What a sync takes of the GPU of an engine that has it for itself, beside the cache: a bucket and its copy."""
    return 2 * bucket_bytes(run)


def _sending_bytes(run: PlannedRun) -> int:
    """A bucket, of several ranks its shards, and two that engines take in turn, of which one at most is large."""
    alone = run.config.trainer.parallel.world_size == 1
    return (2 if alone else 3) * bucket_bytes(run) + run.config.bucket_bytes(on_gpus=True)


def bucket_bytes(run: PlannedRun) -> int:
    """A bucket, or the largest tensor where that alone is larger: the embedding."""
    embedding = run.dimensions.vocab_size * run.dimensions.hidden_size * run.element_bytes
    return max(run.config.bucket_bytes(on_gpus=True), embedding)


def _trainer_reserve(estimate: RankEstimate) -> Item:
    return Item("trainer's CUDA and NCCL (assumed)", Hardware.process_bytes(estimate.communicators))


def _state(memory: TrainerMemory) -> Iterator[Item]:
    yield Item("parameters", memory.parameter_bytes)
    yield Item("gradients", memory.gradient_bytes)
    yield Item("optimizer state", memory.optimizer_bytes)


def _training(memory: TrainerMemory) -> Iterator[Item]:
    """Activations and the optimizer's temporaries are not there at once: of the latter only the excess counts."""
    busy = memory.activation_bytes + memory.head_bytes
    excess = max(0, memory.update_bytes - busy)
    yield Item(ACTIVATIONS, memory.activation_bytes)
    yield Item(HEAD, memory.head_bytes)
    if excess:
        yield Item(OPTIMIZER_STEP, excess)
    yield Item("communication buffers", memory.communication_bytes)
    yield Item("fragmentation (assumed)", int(FRAGMENTATION * (busy + excess)))


def _scoring(memory: TrainerMemory, swaps_reference: bool = False) -> Iterator[Item]:
    yield Item(ACTIVATIONS, memory.forward_bytes)
    if swaps_reference:
        yield Item("policy, swapped out", memory.parameter_bytes)
    yield Item("communication buffers", memory.communication_bytes)
    yield Item("fragmentation (assumed)", int(FRAGMENTATION * memory.forward_bytes))


@dataclass(frozen=True, slots=True)
class HostMemory:
    """Host memory of one node beside the processes themselves, in bytes; its capacity if that is given."""

    items: tuple[Item, ...]
    capacity: int | None

    @property
    def total(self) -> int:
        return sum(item.nbytes for item in self.items)

    @property
    def fits(self) -> bool:
        return self.capacity is None or self.total <= self.capacity


def host_memory(
    run: PlannedRun, estimates: Sequence[RankEstimate], engine: EnginePlan | None, transport: str | None
) -> HostMemory:
    """A node full of trainer ranks (and, colocated, of engines), by the kind that needs most.

    Args:
        transport: that weights travel by, if they do.
    """
    config = run.config
    gpus = min(config.cluster.gpus_per_node, config.trainer.parallel.world_size)
    memories = [estimate.memory for estimate in estimates]
    items = [
        Item("optimizer state, offloaded", gpus * max(m.host_optimizer_bytes for m in memories)),
        Item("reference weights", gpus * max(m.host_reference_bytes for m in memories)),
        Item("activations, offloaded", gpus * max(m.host_activation_bytes for m in memories)),
    ]
    save = "checkpoint save, asynchronous" if config.checkpoint.async_save else "checkpoint save"
    items.append(Item(save, gpus * max(save_bytes(run, memory) for memory in memories)))
    if run.colocated and engine is not None:
        moved = max(m.parameter_bytes + m.optimizer_bytes for m in memories)
        items.append(Item("trainers, while engines sample", gpus * moved))
        if can_keep_weights(config, run.dimensions):
            items.append(Item("engine weights, while they sleep", gpus * engine.weight_bytes))
    if transport == SHARED_MEMORY:
        # One rank of each pipeline stage that lies on the node sends weights.
        senders = -(-gpus * config.trainer.parallel.pipeline // config.trainer.parallel.world_size)
        items.append(Item("weight buckets in /dev/shm", senders * 2 * bucket_bytes(run)))
    if transport is not None and engine is not None and use_delta(config.sync.delta, transport, config.model.dtype):
        # The sending rank of a stage holds its stage, every worker of an engine the whole model.
        items.append(Item("sync.delta: senders' copies", run.weight_bytes))
        workers = min(gpus, engine.gpus * config.rollout.num_engines)
        items.append(Item("sync.delta: engines' copies", run.weight_bytes * workers))
    if config.cluster.address is None:  # of a cluster that is joined only its owner knows
        items.append(Item("Ray's object store", config.cluster.object_store_mb * 2**20))
    capacity = config.cluster.host_memory_gib
    return HostMemory(tuple(item for item in items if item.nbytes), None if capacity is None else int(capacity * 2**30))


def save_bytes(run: PlannedRun, memory: TrainerMemory) -> int:
    """Host memory of one rank's save, above what it holds while it trains.

    Assumed: a save copies one tensor at a time to host memory and writes it. The largest is the embedding's main
    weight, float32, of which a rank holds at most its tensor-parallel share. An asynchronous save first copies all
    that it writes: weights, main weights and both moments. Of state that is offloaded already, gradients are the
    fourth part, and are not saved.
    """
    embedding = run.dimensions.vocab_size * run.dimensions.hidden_size // run.config.trainer.parallel.tensor
    in_flight = embedding * 4
    if not run.config.checkpoint.async_save:
        return in_flight
    return in_flight + memory.parameter_bytes + memory.optimizer_bytes + 3 * memory.host_optimizer_bytes // 4
