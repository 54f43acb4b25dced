"""Predicted time of sampling one step's sequences."""

import math
from dataclasses import dataclass

from slime_like.planning.engines import EnginePlan
from slime_like.planning.planned_run import PlannedRun

ALL_REDUCE_S = 20e-6
"""Assumed latency of one all-reduce of a decoded token inside a node; each layer has two."""


@dataclass(frozen=True, slots=True)
class Generation:
    """Sampling on one engine; all engines have the same share.

    Attributes:
        sequences: of one step.
        at_once: of these, at most so many are decoded at once; the others wait for a place, in ``waves``.
        tokens: that each sequence decodes.
        prefill: seconds, of all prompts.
        weights, cache, products, messages: seconds of decoding one token of each sequence of a wave of mean size:
            reading weights and KV cache, or, where these take longer, matrix products; and messages between the
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
        return max(self.weights + self.cache, self.products) + self.messages

    @property
    def seconds(self) -> float:
        return self.prefill + self.waves * self.tokens * self.token


def predict_generation(run: PlannedRun, engine: EnginePlan) -> Generation:
    """Prefill at the rate of matrix products, decoding at the rate of memory or of matrix products."""
    rollout, hardware, workload, dimensions = run.config.rollout, run.hardware, run.workload, run.dimensions
    sequences = math.ceil(workload.samples * rollout.oversample / rollout.num_engines)
    at_once = max(1, min(engine.at_once, sequences))
    wave = sequences / math.ceil(sequences / at_once)
    per_token = 2.0 * dimensions.active_parameters / engine.gpus
    # Samples of one prompt share its prefill.
    prompts = sequences / rollout.samples_per_prompt
    cache = wave * (workload.mean_prompt + workload.mean_response / 2) * engine.kv_bytes_per_token
    # Of a mixture of experts, at most the experts of so many tokens are read.
    read = min(1.0, wave * dimensions.active_parameters / dimensions.num_parameters)
    return Generation(
        sequences=sequences,
        at_once=at_once,
        tokens=workload.mean_response,
        prefill=hardware.matmul_seconds(prompts * workload.mean_prompt * per_token),
        weights=hardware.memory_seconds(engine.weight_bytes * read),
        cache=hardware.memory_seconds(cache),
        products=hardware.matmul_seconds(wave * per_token),
        messages=_message_seconds(run, engine, wave),
    )


def _message_seconds(run: PlannedRun, engine: EnginePlan, sequences: float) -> float:
    """Two all-reduces of hidden states per layer; an engine's GPUs share a node."""
    if engine.gpus == 1:
        return 0.0
    sent = 2 * (engine.gpus - 1) / engine.gpus * sequences * run.dimensions.hidden_size * run.element_bytes
    return 2 * run.dimensions.num_layers * (ALL_REDUCE_S + run.hardware.link_seconds(sent, range(engine.gpus)))
