"""Memory of an engine, of a GPU in each phase and of a node, and whether everything fits."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from slime_like.interfaces.engine_limits import engine_limits
from slime_like.interfaces.estimate import RankEstimate, RankKind, TrainerMemory
from slime_like.planning.hardware import GIB, Hardware
from slime_like.planning.planned_run import PlannedRun
from slime_like.weights.transports.registry import use_delta
from slime_like.weights.transports.shared_memory import NAME as SHARED_MEMORY

ENGINES = "engines"
"""Name of engines' separate GPUs."""
TRAINING, ACTIVATIONS = "training", "activations"
_ENGINE_RESERVE = "engine's reserve (assumed)"

_ONLY_KIND = re.compile(r"(, )?(stage 1 of 1|all ranks)$")
"""Name of the kind of ranks if a layout has only one."""

_ENGINE_COMMUNICATORS = 2
"""Groups of a rank in an engine with several GPUs: all ranks, and its tensor-parallel group or its pipeline."""

_GRAPHS_BYTES = GIB
"""CUDA graphs of an engine. Sleeping vLLM engines of two GPUs have been reported to keep 2.4 to 7.4 GB, including
context and groups (NeMo-RL issue 223)."""

_PREFILL_BYTES = GIB // 2
"""Activations of an engine's prefill."""

_FRAGMENTATION = 0.05
"""Share of activations and temporaries that the allocator loses."""

_MOST_AT_ONCE = 512
"""Sequences that the adapters let an engine decode at the same time."""


@dataclass(frozen=True, slots=True)
class EnginePlan:
    """One engine. Bytes are per GPU.

    Attributes:
        gpus: GPUs of the engine.
        sleeping_bytes: context, groups and graphs (assumed), which a sleeping engine keeps.
        reserve_bytes: ``sleeping_bytes`` and a prefill's activations.
        kv_bytes_per_token: KV cache of one token in a stage's layers; if the model has fewer KV heads than the stage
            has GPUs, heads are repeated.
        state_tokens: tokens whose KV cache is as large as the states of one sequence's recurrent layers.
        kv_tokens: tokens that the cache of the whole engine holds.
        longest_sequences: sequences of ``rollout.max_model_len`` that it holds at the same time.
        at_once: sequences of mean length that it decodes at the same time, within the adapter's limit.
    """

    gpus: int
    weight_bytes: int
    kv_bytes: int
    sleeping_bytes: int
    reserve_bytes: int
    kv_bytes_per_token: int
    state_tokens: int
    kv_tokens: int
    longest_sequences: int
    at_once: int


def plan_engine(run: PlannedRun) -> EnginePlan:
    rollout = run.config.rollout
    layers, outer = run.dimensions.num_layers, run.dimensions.vocab_size * run.dimensions.hidden_size
    stage, outer = -(-layers // rollout.pipeline), outer * run.element_bytes  # the longest stage, and its embedding
    weights = run.weight_bytes if rollout.pipeline == 1 else outer + (run.weight_bytes - 2 * outer) * stage // layers
    weights = weights // rollout.tensor + 2 * run.adapter_bytes  # one slot stays empty
    per_token = (
        run.dimensions.attention.cache_elements(run.dimensions, rollout.tensor) * run.element_bytes * stage // layers
    )
    linear = run.dimensions.attention.linear
    states = 0 if linear is None else linear.state_bytes(run.element_bytes) // rollout.tensor * stage // layers
    state_tokens = -(-states // per_token)
    given = rollout.own_engine_args.get("kv_cache_memory_bytes")
    limits = engine_limits(rollout.engine)
    share = rollout.own_engine_args.get(limits.share_argument, limits.default_share)
    if not isinstance(share, int | float):  # a check reports it
        share = limits.default_share
    taken = int(share * run.hardware.memory_bytes)
    groups = _ENGINE_COMMUNICATORS * (rollout.ranks > 1) + (rollout.tensor > 1 and rollout.pipeline > 1)
    sleeping = run.hardware.process_bytes(groups) + _GRAPHS_BYTES
    reserve = sleeping + _PREFILL_BYTES
    cache = int(given) if given is not None else taken - weights - reserve
    tokens = max(0, cache) // per_token
    limit = min(rollout.max_concurrent_requests * rollout.samples_per_prompt, _MOST_AT_ONCE)
    return EnginePlan(
        gpus=rollout.ranks,
        weight_bytes=weights,
        kv_bytes=cache,
        sleeping_bytes=sleeping,
        reserve_bytes=reserve,
        kv_bytes_per_token=per_token,
        state_tokens=state_tokens,
        kv_tokens=tokens,
        longest_sequences=tokens // (run.config.max_model_len + state_tokens),
        at_once=min(limit, int(tokens / (run.workload.mean_length + state_tokens))),
    )


@dataclass(frozen=True, slots=True)
class PhaseMemory:
    """Contents of one GPU in one phase of a step, for one kind of trainer ranks or for engines; bytes by name."""

    gpus: str
    phase: str
    items: dict[str, int]
    capacity: int

    @property
    def total(self) -> int:
        return sum(self.items.values())

    @property
    def margin(self) -> int:
        """Free bytes; below 0 if the contents do not fit."""
        return self.capacity - self.total

    @property
    def fits(self) -> bool:
        return self.margin >= 0

    @property
    def kind(self) -> str:
        """Name of the GPUs; "" if the trainer's are all alike."""
        return _ONLY_KIND.sub("", self.gpus)

    @property
    def place(self) -> str:
        return f"{self.phase}, {self.kind}" if self.kind and self.kind not in self.phase else self.phase


def trainer_phases(
    run: PlannedRun, engine: EnginePlan | None, kind: RankKind, estimate: RankEstimate
) -> list[PhaseMemory]:
    """Return the phases of a GPU of one kind of trainer ranks, including the engine if it is colocated."""
    config, shared = run.config, engine if run.colocated else None
    sleeping = {} if shared is None else {"sleeping engine (assumed)": shared.sleeping_bytes}
    reserve = _trainer_reserve(estimate)
    memory = estimate.memory
    training = replace(memory, gradient_bytes=memory.gradient_bytes + memory.window_gradient_bytes)
    # The optimizer's temporaries reuse activations' memory, so only their excess counts.
    busy = memory.activation_bytes + memory.head_bytes
    excess = max(0, memory.update_bytes - busy)
    passes = {
        ACTIVATIONS: memory.activation_bytes,
        "head": memory.head_bytes,
        "optimizer step's temporaries": excess,
        "communication buffers": memory.communication_bytes,
        "fragmentation (assumed)": int(_FRAGMENTATION * (busy + excess)),
    }
    found = {TRAINING: _state(training) | passes | sleeping}
    if config.roles.scoring:
        swapped = (
            memory.trained_bytes if config.has_same_base(one) else memory.parameter_bytes for one in config.roles.held
        )
        found["scoring"] = _state(memory) | _scoring(memory, max(swapped, default=0)) | sleeping
    # A bucket, its shards if there are several ranks, and two buckets in flight, at most one of them large. A colocated
    # engine receives one.
    buckets = 2 + (config.trainer.parallel.world_size > 1) + (shared is not None)
    sync = {"sync buffers": buckets * bucket_bytes(run) + config.bucket_bytes(on_gpus=True)}
    if config.model.lora.is_set and not run.adapter_bytes:
        # Weight, product and sum of the largest matrix in float32, and a bucket's merged shards.
        largest = 2 * run.dimensions.ffn_hidden_size * run.dimensions.hidden_size // config.trainer.parallel.tensor
        sync["merging of factors"] = 12 * largest + config.bucket_bytes(on_gpus=True)
    if shared is not None:
        awake = {"engine weights": shared.weight_bytes, _ENGINE_RESERVE: shared.reserve_bytes}
        found["weight sync"] = {"parameters": memory.parameter_bytes} | sync | awake
        found["generation"] = awake | {"KV cache": max(0, shared.kv_bytes)}
    elif engine is not None:
        found["weight sync"] = _state(memory) | sync
    return [PhaseMemory(kind.name, phase, items | reserve, run.hardware.memory_bytes) for phase, items in found.items()]


def engine_phase(run: PlannedRun, engine: EnginePlan) -> PhaseMemory:
    items = {
        "engine weights": engine.weight_bytes,
        "KV cache": max(0, engine.kv_bytes),
        "sync buffers": 2 * bucket_bytes(run),  # a received bucket and its copy
        _ENGINE_RESERVE: engine.reserve_bytes,
    }
    return PhaseMemory(ENGINES, "generation", items, run.hardware.memory_bytes)


def worker_phase(hardware: Hardware, role: str, kind: RankKind, estimate: RankEstimate) -> PhaseMemory:
    """Return the contents of a GPU of a role's worker: weights and a pass without gradients."""
    items = {"parameters": estimate.memory.parameter_bytes} | _scoring(estimate.memory) | _trainer_reserve(estimate)
    return PhaseMemory(kind.name, f"{role} scoring", items, hardware.memory_bytes)


def bucket_bytes(run: PlannedRun) -> int:
    """Return the size of a bucket, or of the largest tensor, the embedding, if that is larger."""
    if run.adapter_bytes:
        return run.config.bucket_bytes(on_gpus=True)
    embedding = run.dimensions.vocab_size * run.dimensions.hidden_size * run.element_bytes
    return max(run.config.bucket_bytes(on_gpus=True), embedding)


def _trainer_reserve(estimate: RankEstimate) -> dict[str, int]:
    return {"trainer's CUDA and NCCL (assumed)": Hardware.process_bytes(estimate.communicators)}


def _state(memory: TrainerMemory) -> dict[str, int]:
    return {
        "parameters": memory.parameter_bytes,
        "gradients": memory.gradient_bytes,
        "optimizer state": memory.optimizer_bytes,
        "teacher's head": memory.teacher_bytes,
    }


def _scoring(memory: TrainerMemory, swapped: int = 0) -> dict[str, int]:
    return {
        ACTIVATIONS: memory.forward_bytes,
        "policy, swapped out": swapped,
        "communication buffers": memory.communication_bytes,
        "fragmentation (assumed)": int(_FRAGMENTATION * memory.forward_bytes),
    }


@dataclass(frozen=True, slots=True)
class NodeMemory:
    """Host memory of one node without the processes themselves, in bytes by name, and its capacity if that is given."""

    items: dict[str, int]
    capacity: int | None

    @property
    def total(self) -> int:
        return sum(self.items.values())

    @property
    def fits(self) -> bool:
        return self.capacity is None or self.total <= self.capacity


def host_memory(
    run: PlannedRun,
    estimates: Sequence[RankEstimate],
    engine: EnginePlan | None,
    transport: str | None,
    critic: Sequence[RankEstimate] = (),
) -> NodeMemory:
    """Return the host memory of a node full of trainer ranks (and colocated engines) of the kind that needs most.

    Args:
        transport: transport of weights, if there are engines.
        critic: estimates of the critic's ranks.
    """
    config = run.config
    gpus = min(config.cluster.gpus_per_node, config.trainer.parallel.world_size)
    memories = [estimate.memory for estimate in estimates]
    items = {
        "optimizer state, offloaded": gpus * max(m.host_optimizer_bytes for m in memories),
        "frozen weights": gpus * max(m.host_frozen_bytes for m in memories),
        "activations, offloaded": gpus * max(m.host_activation_bytes for m in memories),
    }
    save = "checkpoint save, asynchronous" if config.checkpoint.async_save else "checkpoint save"
    items[save] = gpus * max(save_bytes(run, memory) for memory in memories)
    moved = max(m.parameter_bytes + m.optimizer_bytes for m in memories)
    if critic and config.critic.placement == "shared":
        of_critic = max(one.memory.parameter_bytes + one.memory.optimizer_bytes for one in critic)
        items["critic or policy, while the other trains"] = gpus * max(moved * (not run.colocated), of_critic)
    if run.colocated and engine is not None:
        items["trainers, while engines sample"] = gpus * moved
        if engine_limits(config.rollout.engine).keeps_weights(config, run.dimensions):
            items["engine weights, while they sleep"] = gpus * engine.weight_bytes
    if transport == SHARED_MEMORY:
        # One rank of each pipeline stage on the node sends weights.
        senders = -(-gpus * config.trainer.parallel.pipeline // config.trainer.parallel.world_size)
        items["weight buckets in /dev/shm"] = senders * 2 * bucket_bytes(run)
    if transport is not None and engine is not None and use_delta(config.sync.delta, transport, config.model.dtype):
        # A stage's sending rank keeps its stage, and every worker of an engine keeps the whole model.
        workers = min(gpus, engine.gpus * config.rollout.num_engines)
        items["sync.delta: senders' copies"] = run.weight_bytes
        items["sync.delta: engines' copies"] = run.weight_bytes * workers
    if config.cluster.address is None:  # the owner of a cluster that is joined chose its store's size
        items["Ray's object store"] = config.cluster.object_store_mb * 2**20
    capacity = config.cluster.host_memory_gib
    items = {name: nbytes for name, nbytes in items.items() if nbytes}
    return NodeMemory(items, None if capacity is None else int(capacity * GIB))


def save_bytes(run: PlannedRun, memory: TrainerMemory) -> int:
    """Return the host memory that one rank's save takes on top of what the rank holds while it trains.

    A save is assumed to copy one tensor at a time to host memory and to write it. The largest is the embedding's
    float32 main weight; a rank holds at most its tensor-parallel share. An asynchronous save first copies everything
    that it writes: weights, main weights and both moments. A quarter of offloaded state is gradients, which are not
    saved.
    """
    embedding = run.dimensions.vocab_size * run.dimensions.hidden_size // run.config.trainer.parallel.tensor
    in_flight = 2 * memory.trained_bytes if run.config.model.lora.is_set else embedding * 4
    if not run.config.checkpoint.async_save:
        return in_flight
    return in_flight + memory.trained_bytes + memory.optimizer_bytes + 3 * memory.host_optimizer_bytes // 4
