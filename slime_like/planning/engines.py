"""Memory of an engine's GPUs, the sequences that its KV cache holds, and the time of sampling a step."""

import math
from dataclasses import dataclass

from slime_like.checks.engine_arguments import DEFAULT_SHARES, SHARES
from slime_like.planning.hardware import ENGINE_COMMUNICATORS, GRAPHS_BYTES, PREFILL_BYTES
from slime_like.planning.planned_run import PlannedRun

_DEFAULT_SHARE = 0.9
"""Share of a GPU's memory that a custom engine takes."""
_MOST_AT_ONCE = 512
"""Sequences that the adapters let an engine decode at the same time."""
ALL_REDUCE_S = 20e-6
"""Assumed latency of one all-reduce of a decoded token inside a node; each layer has two. Between nodes, twice that."""


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
    per_token = run.dimensions.attention.cached(run.dimensions, rollout.tensor) * run.element_bytes * stage // layers
    linear = run.dimensions.attention.linear
    states = 0 if linear is None else linear.state_bytes(run.element_bytes) // rollout.tensor * stage // layers
    state_tokens = -(-states // per_token)
    given = rollout.own_engine_args.get("kv_cache_memory_bytes")
    default = DEFAULT_SHARES.get(rollout.engine, _DEFAULT_SHARE)
    share = rollout.own_engine_args.get(SHARES.get(rollout.engine, ""), default)
    if not isinstance(share, int | float):  # a check reports it
        share = default
    taken = int(share * run.hardware.memory_bytes)
    groups = ENGINE_COMMUNICATORS * (rollout.ranks > 1) + (rollout.tensor > 1 and rollout.pipeline > 1)
    sleeping = run.hardware.process_bytes(groups) + GRAPHS_BYTES
    reserve = sleeping + PREFILL_BYTES
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
class Generation:
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


def predict_generation(run: PlannedRun, engine: EnginePlan) -> Generation:
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
    return Generation(
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
