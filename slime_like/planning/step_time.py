"""Predicted time of a step, from the ranks' computation and messages and from assumed figures of the hardware."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from slime_like.config.roles import ModelRole
from slime_like.config.trainer import FSDP
from slime_like.interfaces.engine_limits import engine_limits
from slime_like.interfaces.estimate import RankEstimate, Work
from slime_like.orchestration.trainer.batcher import packs_per_request
from slime_like.planning.generation import predict_generation
from slime_like.planning.memory import EnginePlan
from slime_like.planning.planned_run import PlannedRun


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
    update = max(_update_seconds(run, estimate, slot) for estimate in estimates)
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
    attention, asynchronous collectives with matrix products, and FSDP's weights with the whole pass: the longer of the
    two counts. A pass takes at least as long as the host needs to launch its kernels.
    """
    hardware, workload = run.hardware, run.workload
    shorter = workload.attention_length / estimate.longest
    if workload.sharing == 1:
        shorter = min(1.0, shorter)
    shown, context, hidden, weights = 0.0, 0.0, 0.0, 0.0
    for sent in work.traffic:
        seconds = hardware.link_seconds(sent.nbytes, sent.ranks, sent.pattern, sent.calls)
        if sent.axis == "context":
            context += seconds
        elif run.config.trainer.backend == FSDP:
            weights += seconds
        else:
            covered = seconds * sent.hidden_bytes / max(1, sent.nbytes)
            hidden += covered
            shown += seconds - covered
    products = max(hardware.matmul_seconds(work.matmul_flops - work.head_flops, work.fp8_share), hidden)
    products += hardware.matmul_seconds(work.head_flops) + hardware.grouped_seconds(work.grouped_flops)
    attention = max(hardware.attention_seconds(work.attention_flops * shorter), context)
    kernels = hardware.memory_seconds(hardware.assumed.fused * work.kernel_bytes)
    computing = workload.filled * (products + attention + kernels + shown)
    launching = work.kernels * hardware.assumed.launch_s
    host = hardware.host_seconds(_streamed_bytes(run, estimate, work is estimate.training))
    return max(computing, launching, weights, host)


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


def _update_seconds(run: PlannedRun, estimate: RankEstimate, slot: float) -> float:
    """Predict the time of the sums over replicas, and of the optimizer, which reads and writes its state once.

    With ``optimizer.overlap``, messages overlap with the last backward and the next forward: about one ``slot``.

    If state is offloaded, float32 gradients go to the host and float32 weights come back: half of the offloaded bytes.
    The node's processors read all of it and write everything except the gradients.
    """
    hardware, memory = run.hardware, estimate.memory
    sent = (hardware.link_seconds(t.nbytes, t.ranks, t.pattern, t.calls) for t in estimate.update.traffic)
    seconds = max(0.0, sum(sent) - slot * run.config.trainer.optimizer.overlap)
    seconds += hardware.memory_seconds(2 * memory.optimizer_bytes + memory.gradient_bytes)
    ranks = min(hardware.gpus_per_node, run.config.trainer.parallel.world_size)
    on_host = ranks * 7 / 4 * memory.host_optimizer_bytes / (hardware.assumed.host_memory_gb_per_s * 1e9)
    return seconds + hardware.host_seconds(memory.host_optimizer_bytes / 2) + on_host


def _sync_seconds(run: PlannedRun, transport: str) -> float:
    rate = run.hardware.assumed.sync_gb_per_s[transport]
    ranks = range(run.config.trainer.parallel.world_size)
    if transport == "nccl" or (transport == "colocated" and run.hardware.crosses_nodes(ranks)):
        rate = min(rate, run.hardware.network_gb_per_s * run.hardware.assumed.link)
    return (run.adapter_bytes or run.weight_bytes) / (rate * 1e9)


def _moving_seconds(run: PlannedRun, estimates: Sequence[RankEstimate], engine: EnginePlan | None) -> float:
    """Predict colocated moves: weights, optimizer state, and engine weights that are kept, once out and once back."""
    if engine is None or not run.colocated:
        return 0.0
    largest = max(estimate.memory.parameter_bytes + estimate.memory.optimizer_bytes for estimate in estimates)
    copies = engine_limits(run.config.rollout.engine).copies_weights(run.config, run.dimensions)
    kept = engine.weight_bytes if copies else 0
    return run.hardware.host_seconds(2 * (largest + kept))
