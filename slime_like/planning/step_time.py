"""Predicted time of a step, from the ranks' computation and messages and assumed hardware figures."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from slime_like.config import RunConfig
from slime_like.interfaces.estimate import RankEstimate, Work
from slime_like.models.dimensions import ModelDimensions
from slime_like.planning.engines import EnginePlan
from slime_like.planning.hardware import Hardware

SYNC_GB_PER_S = {"nccl": 40.0, "cuda_ipc": 200.0, "shared_memory": 8.0, "gloo": 2.0, "directory": 1.0}
"""Assumed speeds of weight transports; NCCL's is bounded by the network as well."""

_HIDDEN = frozenset({"context"})
"""Axes whose messages travel while attention computes; what takes longer than it shows."""


@dataclass(frozen=True, slots=True)
class Workload:
    """Workload of a step.

    Attributes:
        samples: sequences of a step.
        mean_prompt, mean_response: their tokens on average.
        micro_batches: per replica and optimizer step.
        per_micro_batch: sequences of mean length that fit into one.
        filled: share of a micro-batch's token budget that whole sequences of mean length fill.
    """

    samples: int
    mean_prompt: float
    mean_response: float
    micro_batches: int
    per_micro_batch: int
    filled: float

    @property
    def mean_length(self) -> float:
        return self.mean_prompt + self.mean_response

    @classmethod
    def of(cls, config: RunConfig, mean_prompt: float | None, mean_response: float | None) -> Workload:
        """Lengths that are not given are the longest allowed, which is an upper bound."""
        prompt = config.data.max_prompt_tokens if mean_prompt is None else mean_prompt
        response = config.rollout.max_new_tokens if mean_response is None else mean_response
        samples = config.rollout.prompts_per_step * (1 if config.supervised else config.rollout.samples_per_prompt)
        per_update = samples / config.algorithm.minibatches / config.trainer.parallel.data
        fitting = max(1, int(config.trainer.target_tokens_per_batch / (prompt + response)))
        filled = min(1.0, fitting * (prompt + response) / config.trainer.target_tokens_per_batch)
        return cls(samples, prompt, response, math.ceil(per_update / fitting), fitting, filled)


@dataclass(frozen=True, slots=True)
class StepTime:
    """Predicted seconds of one step, and what it computes and moves.

    Attributes:
        generation, scoring, training, sync, moving: phases; ``moving`` is what colocated devices are emptied and
            filled in.
        references: what reference workers need for the step's sequences, which they score while others are sampled.
        overlapped: sampling runs beside training (``rollout.max_staleness``).
        after_last: of scoring and training, what cannot begin before the last sample is there: all of it, or with
            ``rollout.stream`` the last micro-batch and the update.
        model_flops: of scoring and training, on all ranks, recomputation not counted.
        utilisation: of all trainer GPUs' data-sheet rate while they train.
    """

    generation: float
    scoring: float
    training: float
    sync: float
    moving: float
    references: float
    overlapped: bool
    after_last: float
    model_flops: float
    utilisation: float

    @property
    def total(self) -> float:
        ours, sampled = self.scoring + self.training, max(self.generation, self.references)
        together = max(sampled, ours) if self.overlapped else max(sampled, ours - self.after_last) + self.after_last
        return together + self.sync + self.moving


@dataclass(frozen=True, slots=True)
class LinkTraffic:
    """Bytes that one rank sends in one step over one axis, and over which link."""

    axis: str
    link: str
    nbytes: float
    calls: float


def predict(
    config: RunConfig,
    dimensions: ModelDimensions,
    hardware: Hardware,
    workload: Workload,
    estimates: Sequence[RankEstimate],
    engine: EnginePlan | None,
    transport: str | None,
    references: float = 0.0,
) -> StepTime:
    """The whole step. ``estimates`` has every kind of rank; the slowest stage decides. ``references`` are seconds."""
    layout, algorithm = config.trainer.parallel, config.algorithm
    updates = algorithm.epochs * algorithm.minibatches
    bubble = (layout.pipeline - 1) / layout.virtual_pipeline
    slots = workload.micro_batches + bubble
    slot = max(pass_seconds(hardware, workload, estimate, estimate.training) for estimate in estimates)
    update = max(_update_seconds(hardware, estimate) for estimate in estimates)
    training = updates * (slots * slot + update)
    scores = int(config.reference_in_trainer) + int(algorithm.scores_policy and not config.supervised)
    forward_slots = workload.micro_batches * algorithm.minibatches + layout.pipeline - 1
    score_slot = scores * max(pass_seconds(hardware, workload, estimate, estimate.forward) for estimate in estimates)
    scoring = forward_slots * score_slot
    useful = 6.0 * dimensions.active_parameters + 6.0 * dimensions.num_layers * workload.mean_length * (
        dimensions.num_heads * dimensions.head_dim
    )
    flops = useful * workload.samples * workload.mean_length * algorithm.epochs
    peak = layout.world_size * hardware.gpu.tflops * 1e12
    return StepTime(
        generation=0.0 if engine is None else generation_seconds(config, dimensions, hardware, workload, engine),
        scoring=scoring,
        training=training,
        sync=0.0 if engine is None or transport is None else _sync_seconds(config, dimensions, hardware, transport),
        moving=_moving_seconds(config, hardware, estimates, engine),
        references=references,
        overlapped=config.rollout.max_staleness > 0,
        after_last=(1 + bubble) * (score_slot + slot) + update if config.rollout.stream else scoring + training,
        model_flops=flops * (1 + scores / 3),
        utilisation=flops / (training * peak),
    )


def traffic_per_step(
    config: RunConfig, hardware: Hardware, workload: Workload, estimate: RankEstimate
) -> list[LinkTraffic]:
    """Messages of one rank in training, by axis and link; scoring's messages are left out."""
    updates = config.algorithm.epochs * config.algorithm.minibatches
    found: dict[tuple[str, str], tuple[float, float]] = {}
    full = updates * workload.micro_batches * workload.filled
    for work, times in ((estimate.training, full), (estimate.update, updates)):
        for traffic in work.traffic:
            key = (traffic.axis, "network" if hardware.crosses_nodes(traffic.ranks) else "NVLink")
            nbytes, calls = found.get(key, (0.0, 0.0))
            found[key] = nbytes + times * traffic.nbytes, calls + times * traffic.calls
    return [LinkTraffic(axis, link, nbytes, calls) for (axis, link), (nbytes, calls) in found.items() if nbytes]


def generation_seconds(
    config: RunConfig, dimensions: ModelDimensions, hardware: Hardware, workload: Workload, engine: EnginePlan
) -> float:
    """Prefill at the rate of matrix products; decoding at the rate at which weights and cache are read, or of its
    products where these take longer."""
    sequences = math.ceil(workload.samples * config.rollout.oversample / config.rollout.num_engines)
    at_once = max(1, min(engine.at_once, sequences))
    per_token = 2.0 * dimensions.active_parameters / engine.gpus
    # Samples of one prompt share its prefill.
    prompts = sequences / config.rollout.samples_per_prompt
    prefill = hardware.matmul_seconds(prompts * workload.mean_prompt * per_token)
    cache = at_once * (workload.mean_prompt + workload.mean_response / 2) * engine.kv_bytes_per_token
    reading = hardware.memory_seconds(_weights_read(dimensions, engine, at_once) + cache)
    step = max(reading, hardware.matmul_seconds(at_once * per_token))
    return prefill + math.ceil(sequences / at_once) * workload.mean_response * step


def _weights_read(dimensions: ModelDimensions, engine: EnginePlan, at_once: int) -> float:
    """Bytes of weights read; of a mixture of experts, at most the experts of so many tokens."""
    share = min(1.0, at_once * dimensions.active_parameters / dimensions.num_parameters)
    return engine.weight_bytes * share


def pass_seconds(hardware: Hardware, workload: Workload, estimate: RankEstimate, work: Work) -> float:
    """One micro-batch, as far as it is filled. Attention is scaled from the longest sequence to the mean one."""
    shorter = min(1.0, workload.mean_length / estimate.longest)
    attention = hardware.attention_seconds(work.attention_flops * shorter)
    hidden = sum(hardware.link_seconds(t.nbytes, t.ranks) for t in work.traffic if t.axis in _HIDDEN)
    shown = sum(hardware.link_seconds(t.nbytes, t.ranks) for t in work.traffic if t.axis not in _HIDDEN)
    return workload.filled * (hardware.matmul_seconds(work.matmul_flops) + max(attention, hidden) + shown)


def _update_seconds(hardware: Hardware, estimate: RankEstimate) -> float:
    """Sums over replicas, and the optimizer, which reads and writes its state once; from host memory where it lies."""
    memory = estimate.memory
    sending = sum(hardware.link_seconds(t.nbytes, t.ranks) for t in estimate.update.traffic)
    seconds = hardware.memory_seconds(2 * memory.optimizer_bytes + memory.gradient_bytes)
    return sending + seconds + hardware.host_seconds(memory.host_optimizer_bytes / 2)


def _sync_seconds(config: RunConfig, dimensions: ModelDimensions, hardware: Hardware, transport: str) -> float:
    item = 4 if config.model.dtype == "float32" else 2
    rate = SYNC_GB_PER_S[transport]
    if transport == "nccl":
        rate = min(rate, hardware.network_gb_per_s * hardware.efficiency.link)
    return dimensions.num_parameters * item / (rate * 1e9)


def _moving_seconds(
    config: RunConfig, hardware: Hardware, estimates: Sequence[RankEstimate], engine: EnginePlan | None
) -> float:
    """Colocated: weights and optimizer state leave and come back once a step, and so do the engine's weights."""
    if engine is None or config.cluster.placement != "colocated":
        return 0.0
    largest = max(estimate.memory.parameter_bytes + estimate.memory.optimizer_bytes for estimate in estimates)
    return hardware.host_seconds(2 * (largest + engine.weight_bytes))
