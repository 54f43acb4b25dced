"""Predicted time of a step, from the ranks' computation and messages and from assumed figures of the hardware."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from slime_like.config.roles import ModelRole
from slime_like.config.trainer import FSDP
from slime_like.interfaces.engine_limits import engine_limits
from slime_like.interfaces.estimate import RankEstimate, Work
from slime_like.orchestration.trainer.batcher import packs_per_request
from slime_like.planning.memory import EnginePlan
from slime_like.planning.planned_run import PlannedRun

SYNC_GB_PER_S = {"nccl": 40.0, "colocated": 40.0, "shared_memory": 8.0, "gloo": 2.0, "directory": 1.0}
"""Assumed speeds of weight transports. Between nodes, NCCL's, which colocated also uses, is bounded by the network."""

_KERNEL_BYTES = 0.5
"""Assumed share of the traced bytes of small kernels that remains after fusion (Transformer Engine, torch's
compiler)."""

_HOST_MEMORY_GB_PER_S = 200.0
"""Memory bandwidth of a node while it updates offloaded optimizer state."""

ALL_REDUCE_S = 20e-6
"""Assumed latency of one all-reduce of a decoded token inside a node; each layer has two. Between nodes, twice that."""


@dataclass(frozen=True, slots=True)
class GenerationTime:
    """Sampling of one step on one engine. All engines have the same share of the sequences.

    Attributes:
        sequences: sequences of one step.
        at_once: sequences decoded at the same time; the others wait for a later one of the ``waves``.
        tokens: tokens that each sequence decodes.
        prefill: seconds of prefill of all prompts.
        weights, cache, products, messages: seconds of decoding one token of each sequence of a wave of mean size:
            reading weights, reading KV cache, matrix products (which overlap with reading), and messages between the
            engine's GPUs.
    """

    sequences: int
    at_once: int
    tokens: float
    prefill: float
    weights: float
    cache: float
    products: float
    messages: float

    @property
    def waves(self) -> int:
        return math.ceil(self.sequences / self.at_once)

    @property
    def token(self) -> float:
        """Seconds of decoding one token of each sequence of a wave."""
        return max(self.weights + self.cache, self.products) + self.messages

    @property
    def seconds(self) -> float:
        return self.prefill + self.waves * self.tokens * self.token


def predict_generation(run: PlannedRun, engine: EnginePlan) -> GenerationTime:
    """Predict prefill at the rate of matrix products, and decoding at the rate of memory or of matrix products.

    A pipeline's stages decode parts of a wave in turn. Each part waits for all stages, which read all their weights.
    """
    rollout, hardware, workload, dimensions = run.config.rollout, run.hardware, run.workload, run.dimensions
    sequences = math.ceil(workload.samples * rollout.oversample / rollout.num_engines)
    at_once = max(1, min(engine.at_once, sequences))
    wave = sequences / math.ceil(sequences / at_once)
    per_token = 2.0 * dimensions.active_parameters / engine.gpus
    # Samples of one prompt share its prefill.
    prompts = sequences / rollout.samples_per_prompt
    # States are read and written.
    read_tokens = workload.mean_prompt + workload.mean_response / 2 + 2 * engine.state_tokens
    cache = wave * read_tokens * engine.kv_bytes_per_token
    # A step of a mixture of experts reads at most the experts of the wave's tokens.
    read = min(1.0, wave / rollout.pipeline * dimensions.active_parameters / dimensions.num_parameters)
    return GenerationTime(
        sequences=sequences,
        at_once=at_once,
        tokens=workload.mean_response,
        prefill=hardware.matmul_seconds(prompts * workload.mean_prompt * per_token),
        weights=hardware.memory_seconds(rollout.pipeline * engine.weight_bytes * read),
        cache=hardware.memory_seconds(cache),
        products=hardware.matmul_seconds(wave * per_token),
        messages=_message_seconds(run, wave / rollout.pipeline),
    )


def _message_seconds(run: PlannedRun, sequences: float) -> float:
    """Predict two all-reduces of hidden states per layer among a stage's GPUs, and the hidden states to each stage."""
    tensor, hidden = run.config.rollout.tensor, sequences * run.dimensions.hidden_size * run.element_bytes
    gpus = range(run.config.rollout.ranks)
    seconds = (run.config.rollout.pipeline - 1) * (ALL_REDUCE_S + run.hardware.link_seconds(hidden, gpus))
    if tensor == 1:
        return seconds
    sent, slower = 2 * (tensor - 1) / tensor * hidden, 1 + run.hardware.crosses_nodes(gpus[:tensor])
    per_layer = 2 * (slower * ALL_REDUCE_S + run.hardware.link_seconds(sent, gpus[:tensor]))
    return seconds + run.dimensions.num_layers * per_layer


@dataclass(frozen=True, slots=True)
class StepTime:
    """Predicted seconds of one step.

    Attributes:
        generation, scoring, training, sync: seconds of these phases.
        moving: seconds of moves between colocated GPUs and host memory.
        critic: seconds of the critic that the policy waits for.
        references: seconds of roles' workers, which score sequences while others are sampled.
        overlapped: sampling runs during training (``rollout.max_staleness``).
        after_last: seconds of scoring and training that cannot begin before the last sample is finished: all of them,
            or, with ``rollout.stream``, the last micro-batch and the update.
        utilization: share of the ceiling of all trainer GPUs' matrix products during training.
    """

    generation: float
    scoring: float
    training: float
    sync: float
    moving: float
    references: float
    overlapped: bool
    after_last: float
    utilization: float
    critic: float = 0.0

    @property
    def total(self) -> float:
        ours, sampled = self.scoring + self.critic + self.training, max(self.generation, self.references)
        together = max(sampled, ours) if self.overlapped else max(sampled, ours - self.after_last) + self.after_last
        return together + self.sync + self.moving


def predict_step(
    run: PlannedRun,
    estimates: Sequence[RankEstimate],
    engine: EnginePlan | None,
    transport: str | None,
    references: float = 0.0,
    critic: float = 0.0,
) -> StepTime:
    """Predict the whole step.

    Args:
        estimates: estimates of every kind of rank; the slowest stage decides.
        transport: transport of weights, if there are engines.
        references, critic: seconds of roles' workers, and of the critic.
    """
    config, dimensions, hardware, workload = run.config, run.dimensions, run.hardware, run.workload
    layout, algorithm = config.trainer.parallel, config.algorithm
    updates = algorithm.epochs * algorithm.minibatches
    bubble = (layout.pipeline - 1) / layout.virtual_pipeline
    slots = workload.micro_batches + bubble
    slot = max(pass_seconds(run, estimate, estimate.training) for estimate in estimates)
    update = max(_update_seconds(run, estimate) for estimate in estimates)
    training = updates * (slots * slot + update)
    scores = len({role.section for role in config.roles.scoring})  # teachers share the rows
    forward_slots = workload.micro_batches * algorithm.minibatches + layout.pipeline - 1
    score_slot = scores * max(pass_seconds(run, estimate, estimate.forward) for estimate in estimates)
    scoring = forward_slots * score_slot
    attention = dimensions.attention_layers * workload.attention_length * dimensions.num_heads * dimensions.head_dim
    per_weight = 4.0 if config.model.lora.is_set else 6.0  # the base has no weight gradients
    flops = (per_weight * dimensions.active_parameters + 6.0 * attention) * workload.tokens * algorithm.epochs
    ceiling = layout.world_size * hardware.gpu.ceiling_tflops * 1e12
    if config.critic.placement == "separate":
        critic = max(0.0, critic - training)
    after_last = scoring + critic + training
    if config.rollout.stream:
        after_last = (1 + bubble) * (score_slot + slot) + update
    return StepTime(
        generation=0.0 if engine is None else predict_generation(run, engine).seconds,
        scoring=scoring,
        training=training,
        sync=0.0 if engine is None or transport is None else _sync_seconds(run, transport),
        moving=_moving_seconds(run, estimates, engine),
        references=references,
        overlapped=config.rollout.max_staleness > 0,
        after_last=after_last,
        utilization=flops / (training * ceiling),
        critic=critic,
    )


def critic_seconds(run: PlannedRun, estimates: Sequence[RankEstimate]) -> float:
    """Predict the time in which the critic's ranks score a batch and train on it."""
    passes = run.workload.micro_batches * run.config.algorithm.minibatches + run.config.trainer.parallel.pipeline - 1
    scoring = passes * max(pass_seconds(run, one, one.forward) for one in estimates)
    return scoring + predict_step(run, estimates, None, None).training


def worker_seconds(run: PlannedRun, role: ModelRole, estimates: Sequence[RankEstimate]) -> float:
    """Predict the time of each worker's share of a step, in requests that each fill and empty a pipeline."""
    layout, packs = role.parallel, packs_per_request(run.config.for_worker(role).trainer)
    weights = {source.name: source.weight for source in run.config.data.mixture}
    samples = run.workload.samples * (weights[role.source] / sum(weights.values()) if role.source else 1)
    micro_batches = math.ceil(samples / (role.workers * layout.data) / run.workload.per_micro_batch)
    slots = micro_batches * (packs + layout.pipeline - 1) / packs
    return slots * max(pass_seconds(run, one, one.forward) for one in estimates)


def pass_seconds(run: PlannedRun, estimate: RankEstimate, work: Work) -> float:
    """Predict the time of one micro-batch, filled as much as the mean one.

    Attention is scaled from the longest sequence to the mean one. Messages of context parallelism overlap with
    attention, and asynchronous collectives with matrix products: the longer of the two counts.
    """
    hardware, workload = run.hardware, run.workload
    shorter = workload.attention_length / estimate.longest
    if workload.sharing == 1:
        shorter = min(1.0, shorter)
    shown, context, hidden = 0.0, 0.0, 0.0
    for sent in work.traffic:
        if sent.axis == "context":
            context += hardware.link_seconds(sent.nbytes, sent.ranks)
        else:
            hidden += hardware.link_seconds(sent.hidden_bytes, sent.ranks)
            shown += hardware.link_seconds(sent.nbytes - sent.hidden_bytes, sent.ranks)
    products = max(hardware.matmul_seconds(work.matmul_flops - work.head_flops), hidden)
    products += hardware.matmul_seconds(work.head_flops)
    attention = max(hardware.attention_seconds(work.attention_flops * shorter), context)
    kernels = hardware.memory_seconds(_KERNEL_BYTES * work.kernel_bytes)
    computing = workload.filled * (products + attention + kernels + shown)
    return max(computing, hardware.host_seconds(_streamed_bytes(run, estimate, work is estimate.training)))


def _streamed_bytes(run: PlannedRun, estimate: RankEstimate, training: bool) -> float:
    """Return the bytes that FSDP moves between a GPU and its host during one pass if its state is offloaded.

    It moves float32 weights, a second time for backward if they are freed after forward, and gradients if every
    micro-batch is summed.
    """
    trainer = run.config.trainer
    if trainer.backend != FSDP:
        return 0.0
    weights = estimate.memory.host_optimizer_bytes / 4
    if not training:
        return weights
    return weights * (1 + int(trainer.fsdp.reshard_after_forward) + int(trainer.fsdp.accumulate == "sharded"))


def _update_seconds(run: PlannedRun, estimate: RankEstimate) -> float:
    """Predict the time of the sums over replicas, and of the optimizer, which reads and writes its state once.

    If state is offloaded, float32 gradients go to the host and float32 weights come back: half of the offloaded bytes.
    The node's processors read all of it and write everything except the gradients.
    """
    hardware, memory = run.hardware, estimate.memory
    seconds = sum(hardware.link_seconds(t.nbytes, t.ranks) for t in estimate.update.traffic)
    seconds += hardware.memory_seconds(2 * memory.optimizer_bytes + memory.gradient_bytes)
    ranks = min(hardware.gpus_per_node, run.config.trainer.parallel.world_size)
    on_host = ranks * 7 / 4 * memory.host_optimizer_bytes / (_HOST_MEMORY_GB_PER_S * 1e9)
    return seconds + hardware.host_seconds(memory.host_optimizer_bytes / 2) + on_host


def _sync_seconds(run: PlannedRun, transport: str) -> float:
    rate = SYNC_GB_PER_S[transport]
    ranks = range(run.config.trainer.parallel.world_size)
    if transport == "nccl" or (transport == "colocated" and run.hardware.crosses_nodes(ranks)):
        rate = min(rate, run.hardware.network_gb_per_s * run.hardware.link_efficiency)
    return (run.adapter_bytes or run.weight_bytes) / (rate * 1e9)


def _moving_seconds(run: PlannedRun, estimates: Sequence[RankEstimate], engine: EnginePlan | None) -> float:
    """Predict colocated moves: weights, optimizer state, and engine weights that are kept, once out and once back."""
    if engine is None or not run.colocated:
        return 0.0
    largest = max(estimate.memory.parameter_bytes + estimate.memory.optimizer_bytes for estimate in estimates)
    copies = engine_limits(run.config.rollout.engine).copies_weights(run.config, run.dimensions)
    kept = engine.weight_bytes if copies else 0
    return run.hardware.host_seconds(2 * (largest + kept))
