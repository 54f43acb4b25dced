"""SGLang's engine arguments and environment from the run's configuration. Importing this imports no SGLang."""

import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch

from rollout.arguments import check_known, on_cpu, sequences_at_once, sleep_mode
from slime_like.checks.engine_arguments import DEFAULT_SHARES, SHARES, WEIGHTS_BACKUP, can_keep_weights
from slime_like.checks.environment import expandable_segments
from slime_like.config import RunConfig
from slime_like.models.dimensions import ModelDimensions

SLEEP_ARGUMENT = "enable_memory_saver"
SAMPLING_BACKEND = "pytorch"
"""The backend that ``rollout.sglang.sampler.SeededSampler`` takes the place of; the only one SGLang has on a CPU."""

_CPU_KV_CACHE_BYTES = 1 << 30
_SPARE_POSITIONS = 8
"""SGLang ends a sequence a few positions before its context length; this many more, and it serves ours whole."""


def environment(config: RunConfig, scratch: Path) -> dict[str, str]:
    """Variables of SGLang's process and its children; what the user has set stays.

    An engine's ranks share a host and meet in a file: torch's TCP store would listen on every interface. On a CPU eager
    execution needs no compiler, and a rank has one thread where the actor was given no number.
    """
    defaults = {"HF_HUB_OFFLINE": "1", "GLOO_SOCKET_IFNAME": "lo", "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1"}
    defaults |= {"SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE": f"file://{scratch}/rendezvous"}
    if on_cpu():
        defaults |= {"SGLANG_USE_CPU_ENGINE": "1", "TORCHDYNAMO_DISABLE": "1"}
        defaults |= {"OMP_NUM_THREADS": "1"}
        if config.rollout.tensor > 1:
            defaults |= {"SGLANG_CPU_OMP_THREADS_BIND": _cores(config.rollout.tensor)}
    return {**defaults, **os.environ}


def memory_saver_problem(config: RunConfig, environment: Mapping[str, str]) -> str | None:
    """Why SGLang on a GPU could not give memory back: its memory saver sees ``cudaMalloc``, not expandable segments."""
    given = expandable_segments(environment)
    if given is None or not sleep_mode(config, SLEEP_ARGUMENT):
        return None
    return f"{given} in the environment: its memory saver does not support that"


def engine_arguments(config: RunConfig, engine_index: int, known: Collection[str]) -> dict[str, Any]:
    """SGLang's arguments. Raises ``EngineError`` where ``rollout.engine_args`` names one that is not ``known``."""
    check_known(config, known, "SGLang", "python -m sglang.launch_server")
    return {**_defaults(config), **config.rollout.own_engine_args, **_owned(config, engine_index)}


def _owned(config: RunConfig, engine_index: int) -> dict[str, Any]:
    sleeps = sleep_mode(config, SLEEP_ARGUMENT)
    keeps = can_keep_weights(config, ModelDimensions.from_checkpoint(config.model.path))
    return {
        "model_path": str(config.model.path),
        "dtype": config.model.dtype,
        "trust_remote_code": config.model.trust_remote_code,
        "context_length": config.max_model_len + _SPARE_POSITIONS,
        "tp_size": config.rollout.tensor,
        "random_seed": config.seed + engine_index,
        "device": "cpu" if on_cpu() else "cuda",
        "skip_tokenizer_init": True,  # token ids in, token ids out
        "sampling_backend": SAMPLING_BACKEND,
        "weight_version": "0",
        "sleep_on_idle": True,  # engines and trainers may share cores
        **({} if on_cpu() else {SLEEP_ARGUMENT: sleeps, WEIGHTS_BACKUP: sleeps and keeps}),
    }


def _defaults(config: RunConfig) -> dict[str, Any]:
    defaults: dict[str, Any] = {
        "log_level": "error",
        "grammar_backend": "none",
        "max_running_requests": sequences_at_once(config),
    }
    if on_cpu():
        defaults |= {
            "attention_backend": "torch_native",
            "disable_cuda_graph": True,
            "disable_overlap_schedule": True,
            "max_total_tokens": _cpu_tokens(config),
        }
    else:
        defaults[SHARES["sglang"]] = DEFAULT_SHARES["sglang"]
    return defaults


def _cpu_tokens(config: RunConfig) -> int:
    """Tokens of the KV cache: what all requests at once may need, within a budget, but one whole sequence at least."""
    dimensions = ModelDimensions.from_checkpoint(config.model.path)
    item = getattr(torch, config.model.dtype).itemsize
    per_token = 2 * dimensions.num_layers * dimensions.num_kv_heads * dimensions.head_dim * item
    longest = config.max_model_len + _SPARE_POSITIONS
    return max(2 * longest, min(_CPU_KV_CACHE_BYTES // per_token, sequences_at_once(config) * longest))


def _cores(ranks: int) -> str:
    """SGLang's notation for one share of this process's cores per rank; ranks share cores where these are too few."""
    cores = sorted(os.sched_getaffinity(0))
    shares = [cores[rank::ranks] or [cores[rank % len(cores)]] for rank in range(ranks)]
    return "|".join(",".join(map(str, share)) for share in shares)
