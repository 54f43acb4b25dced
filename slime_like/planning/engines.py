"""Memory of an engine's GPUs, and the sequences that its KV cache holds."""

from dataclasses import dataclass

from slime_like.checks.engine_arguments import DEFAULT_SHARES, SHARES
from slime_like.config import RunConfig
from slime_like.models.dimensions import ModelDimensions
from slime_like.planning.hardware import ENGINE_COMMUNICATORS, GRAPHS_BYTES, PREFILL_BYTES
from slime_like.planning.planned_run import PlannedRun

_DEFAULT_SHARE = 0.9
"""Of a custom engine."""
_MOST_AT_ONCE = 512
"""Sequences that the adapters let an engine decode at once."""


@dataclass(frozen=True, slots=True)
class EnginePlan:
    """One engine, per GPU.

    Attributes:
        gpus: of one engine (``rollout.tensor``).
        sleeping_bytes: context, groups and graphs, assumed; a sleeping engine keeps them.
        reserve_bytes: the same and a prefill's activations.
        kv_bytes_per_token: of each GPU; KV heads are repeated where there are fewer than GPUs.
        kv_tokens: tokens that the cache of the whole engine holds.
        longest_sequences: sequences of ``rollout.max_model_len`` that it holds at once.
        at_once: sequences of mean length that are decoded at once, within the adapter's limit.
    """

    gpus: int
    weight_bytes: int
    kv_bytes: int
    sleeping_bytes: int
    reserve_bytes: int
    kv_bytes_per_token: int
    kv_tokens: int
    longest_sequences: int
    at_once: int


def plan_engine(run: PlannedRun) -> EnginePlan:
    rollout = run.config.rollout
    weights = run.weight_bytes // rollout.tensor
    per_token = run.dimensions.num_layers * _cached_elements(run.dimensions, rollout.tensor) * run.element_bytes
    given = rollout.own_engine_args.get("kv_cache_memory_bytes")
    taken = int(engine_share(run.config) * run.hardware.memory_bytes)
    sleeping = run.hardware.process_bytes(ENGINE_COMMUNICATORS if rollout.tensor > 1 else 0) + GRAPHS_BYTES
    reserve = sleeping + PREFILL_BYTES
    cache = int(given) if given is not None else taken - weights - reserve
    tokens = max(0, cache) // per_token
    limit = min(rollout.max_concurrent_requests * rollout.samples_per_prompt, _MOST_AT_ONCE)
    return EnginePlan(
        gpus=rollout.tensor,
        weight_bytes=weights,
        kv_bytes=cache,
        sleeping_bytes=sleeping,
        reserve_bytes=reserve,
        kv_bytes_per_token=per_token,
        kv_tokens=tokens,
        longest_sequences=tokens // run.config.max_model_len,
        at_once=min(limit, int(tokens / run.workload.mean_length)),
    )


def _cached_elements(dimensions: ModelDimensions, gpus: int) -> int:
    """Of one token in one layer, on each GPU. Of latent attention engines keep what keys and values are made from."""
    latent = dimensions.latent
    if latent is not None:
        return latent.kv_rank + latent.rope_dim
    return 2 * -(-dimensions.num_kv_heads // gpus) * dimensions.head_dim


def engine_share(config: RunConfig) -> float:
    """Share of a GPU's memory that the engine takes in all."""
    engine = config.rollout.engine
    default = DEFAULT_SHARES.get(engine, _DEFAULT_SHARE)
    given = config.rollout.own_engine_args.get(SHARES.get(engine, ""), default)
    return given if isinstance(given, int | float) else default  # a check names what is no share
