"""Predicted time of sampling: continuous batching of responses of different lengths, of which the longest decides."""

import heapq
import math
from dataclasses import dataclass

from slime_like.planning.memory import EnginePlan
from slime_like.planning.planned_run import PlannedRun


@dataclass(frozen=True, slots=True)
class TokenTime:
    """Seconds of decoding one token of each sequence of a batch.

    Attributes:
        weights, cache, products: reading weights, reading KV cache, and matrix products, which overlap with reading.
        messages: messages between the engine's GPUs.
        fixed: the engine's own time.
    """

    weights: float
    cache: float
    products: float
    messages: float
    fixed: float

    @property
    def seconds(self) -> float:
        return max(self.weights + self.cache, self.products) + self.messages + self.fixed


@dataclass(frozen=True, slots=True)
class GenerationTime:
    """Sampling of one step on one engine. All engines have the same share of the sequences.

    Attributes:
        sequences: sequences of one step.
        at_once: sequences decoded at the same time; a waiting one starts when another is finished.
        longest: tokens of the step's longest response.
        prefill: seconds of prefill of all prompts.
        token: a token of a full batch.
        seconds: duration until enough responses are finished.
        tail: the part of it during which less than half of a full batch is decoded.
    """

    sequences: int
    at_once: int
    longest: float
    prefill: float
    token: TokenTime
    seconds: float
    tail: float


def predict_generation(run: PlannedRun, engine: EnginePlan) -> GenerationTime:
    """Predict prefill at the rate of matrix products, and decoding at the rate of memory or of matrix products.

    Without staleness, a step ends with its longest response. Otherwise, engines start responses of the next steps
    meanwhile, so their batches stay full, and only a response that is longer than these steps delays one.
    """
    rollout, workload, lengths = run.config.rollout, run.workload, run.workload.lengths
    needed = math.ceil(workload.samples / rollout.num_engines)
    sequences = math.ceil(workload.samples * rollout.oversample / rollout.num_engines)
    in_flight = sequences * (1 + rollout.max_staleness)
    at_once = max(1, min(engine.at_once, in_flight))
    # Samples of one prompt share its prefill.
    prompts = sequences / rollout.samples_per_prompt * workload.mean_prompt
    per_token = 2.0 * run.dimensions.active_parameters / engine.gpus
    prefill = run.hardware.matmul_seconds(prompts * per_token) / run.hardware.assumed.prefill
    # A sequence that is being decoded is probably a long one, and on average half finished.
    decoded = lengths.square / lengths.mean / 2
    token = token_time(run, engine, at_once, at_once * (workload.mean_prompt + decoded))
    longest = lengths.spread(workload.samples)[-1]
    if rollout.max_staleness:
        decoding = sequences * lengths.mean / at_once * token.seconds
        seconds, tail = max(decoding, longest * token.seconds / (1 + rollout.max_staleness)), 0.0
    else:
        responses = [*lengths.spread(sequences)[:-1], longest]
        seconds, tail = _decode(run, engine, responses, needed, at_once)
    return GenerationTime(sequences, at_once, longest, prefill, token, prefill + seconds, tail)


def _decode(
    run: PlannedRun, engine: EnginePlan, responses: list[float], needed: int, at_once: int
) -> tuple[float, float]:
    """Return the seconds until ``needed`` of the responses are finished, and those with less than half of a batch."""
    count = len(responses)
    # A stride without a common divisor visits every response once, in a mixed order.
    stride = next(step for step in range(int(0.618 * count) + 1, count + 2) if math.gcd(step, count) == 1)
    waiting = [responses[index * stride % count] for index in range(count)]
    ends: list[float] = []
    now, cached, seconds, tail, finished = 0.0, 0.0, 0.0, 0.0, 0
    prompt = run.workload.mean_prompt
    while finished < needed:
        while waiting and len(ends) < at_once:
            heapq.heappush(ends, now + waiting.pop())
            cached += prompt
        running, until = len(ends), ends[0]
        steps = until - now
        taken = steps * token_time(run, engine, running, cached + running * steps / 2).seconds
        seconds += taken
        tail += taken if running < at_once / 2 else 0.0
        cached, now = cached + running * steps, until
        while ends and ends[0] <= now:
            heapq.heappop(ends)
            cached -= cached / (len(ends) + 1)  # about the mean of those that run
            finished += 1
    return seconds, tail


def token_time(run: PlannedRun, engine: EnginePlan, running: float, cached: float) -> TokenTime:
    """Predict one token of each of ``running`` sequences, whose prompts and responses so far are ``cached`` tokens.

    A pipeline's stages decode parts of a batch in turn. Each part waits for all stages, which read all their weights.
    """
    rollout, hardware, dimensions = run.config.rollout, run.hardware, run.dimensions
    part = running / rollout.pipeline
    read = 1.0
    if dimensions.num_experts:  # only the experts that a token is routed to are read
        routed = dimensions.moe_top_k / dimensions.num_experts
        experts = (dimensions.num_parameters - dimensions.active_parameters) / (1 - routed) / dimensions.num_parameters
        read -= experts * (1 - routed) ** part
    cached += 2 * running * engine.state_tokens  # states are read and written
    return TokenTime(
        weights=hardware.memory_seconds(rollout.pipeline * engine.weight_bytes * read),
        cache=hardware.memory_seconds(cached * engine.kv_bytes_per_token),
        products=hardware.matmul_seconds(running * 2.0 * dimensions.active_parameters / engine.gpus),
        messages=_message_seconds(run, part),
        fixed=hardware.assumed.decode_step_s,
    )


def _message_seconds(run: PlannedRun, sequences: float) -> float:
    """Predict two all-reduces of hidden states per layer among a stage's GPUs, and the hidden states to each stage.

    NCCL's latency (``calls``) does not count: engines' kernels for small messages have their own.
    """
    tensor, hidden = run.config.rollout.tensor, sequences * run.dimensions.hidden_size * run.element_bytes
    gpus, latency = range(run.config.rollout.ranks), run.hardware.assumed.decode_all_reduce_s
    seconds = (run.config.rollout.pipeline - 1) * (
        latency + run.hardware.link_seconds(hidden, gpus, "message", calls=0)
    )
    if tensor == 1:
        return seconds
    sent, slower = 2 * (tensor - 1) / tensor * hidden, 1 + run.hardware.crosses_nodes(gpus[:tensor])
    per_layer = 2 * (slower * latency + run.hardware.link_seconds(sent, gpus[:tensor], "all_reduce", calls=0))
    return seconds + run.dimensions.num_layers * per_layer
