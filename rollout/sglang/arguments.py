"""SGLang's engine arguments and environment from the run's configuration. Importing this imports no SGLang."""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from slime_like.errors import EngineError
from slime_like.models.dimensions import ModelDimensions

if TYPE_CHECKING:
    from slime_like.config import RunConfig

SAMPLING_BACKEND = "pytorch"
"""The backend that ``rollout.sglang.sampler.SeededSampler`` takes the place of; the only one SGLang has on a CPU."""

_CPU_KV_CACHE_BYTES = 1 << 30
_LONGEST_BATCH = 512
_SPARE_POSITIONS = 8
"""SGLang ends a sequence a few positions before its context length; this many more, and it serves ours whole."""


def on_cpu() -> bool:
    return not torch.cuda.is_available()


def environment(config: RunConfig, scratch: Path) -> dict[str, str]:
    """Variables of SGLang's process and its children; what the user has set stays.

    An engine's ranks share a host and meet in a file: torch's TCP store would listen on every interface. On a CPU eager
    execution needs no compiler, gloo stays on loopback, and a rank has one thread, as Ray sets it.

    Args:
        scratch: directory for their rendezvous.
    """
    defaults = {"HF_HUB_OFFLINE": "1", "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1"}
    defaults |= {"SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE": f"file://{scratch}/rendezvous"}
    if on_cpu():
        defaults |= {"SGLANG_USE_CPU_ENGINE": "1", "TORCHDYNAMO_DISABLE": "1", "GLOO_SOCKET_IFNAME": "lo"}
        defaults |= {"OMP_NUM_THREADS": "1"}
        if config.rollout.tensor > 1:
            defaults |= {"SGLANG_CPU_OMP_THREADS_BIND": _cores(config.rollout.tensor)}
    return {**defaults, **os.environ}


def sleep_mode(config: RunConfig) -> bool:
    """Must the engine be able to give its memory back? Where it shares devices, yes."""
    return bool(config.rollout.engine_args.get("enable_memory_saver", config.cluster.placement == "colocated"))


def gives_memory_back(config: RunConfig, engine: str) -> bool:
    """False on a CPU. On CUDA, True or an error that names the setting."""
    if on_cpu():
        return False
    if not sleep_mode(config):
        raise EngineError(
            f"{engine} cannot give memory back; set cluster.placement=colocated, or "
            "rollout.engine_args.enable_memory_saver=true"
        )
    return True


def check_length(config: RunConfig, dimensions: ModelDimensions, engine: str) -> None:
    """Raises ``EngineError`` where sequences may become longer than the model's positions."""
    longest, limit = config.max_model_len, dimensions.max_position_embeddings
    if longest > limit:
        raise EngineError(
            f"{engine} did not start: rollout.max_model_len={longest} is more than the model's "
            f"max_position_embeddings={limit}; use at most that"
        )


def engine_arguments(config: RunConfig, engine_index: int, known: Collection[str]) -> dict[str, Any]:
    """Build SGLang's arguments.

    Args:
        known: names of SGLang's arguments.

    Raises:
        EngineError: ``rollout.engine_args`` names an argument that SGLang does not have.
    """
    for name in config.rollout.engine_args:
        if name not in known:
            raise EngineError(
                f"rollout.engine_args.{name}: SGLang has no such argument; see `python -m sglang.launch_server --help`"
            )
    return {**_defaults(config), **config.rollout.engine_args, **_owned(config, engine_index)}


def _owned(config: RunConfig, engine_index: int) -> dict[str, Any]:
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
        **({} if on_cpu() else _memory_saver(config)),
    }


def _memory_saver(config: RunConfig) -> dict[str, bool]:
    """A sleeping engine remembers its weights, in host memory."""
    return {"enable_memory_saver": sleep_mode(config), "enable_weights_cpu_backup": sleep_mode(config)}


def _defaults(config: RunConfig) -> dict[str, Any]:
    at_once = min(config.rollout.max_concurrent_requests * config.rollout.samples_per_prompt, _LONGEST_BATCH)
    defaults: dict[str, Any] = {
        "log_level": "error",
        "grammar_backend": "none",
        "max_running_requests": at_once,
    }
    if on_cpu():
        defaults |= {
            "attention_backend": "torch_native",
            "disable_cuda_graph": True,
            "disable_overlap_schedule": True,
            "max_total_tokens": _cpu_tokens(config, at_once),
        }
    return defaults


def _cpu_tokens(config: RunConfig, at_once: int) -> int:
    """Tokens of the KV cache: what all requests at once may need, within a budget, but one whole sequence at least."""
    dimensions = ModelDimensions.from_checkpoint(config.model.path)
    item = getattr(torch, config.model.dtype).itemsize
    per_token = 2 * dimensions.num_layers * dimensions.num_kv_heads * dimensions.head_dim * item
    longest = config.max_model_len + _SPARE_POSITIONS
    return max(2 * longest, min(_CPU_KV_CACHE_BYTES // per_token, at_once * longest))


def _cores(ranks: int) -> str:
    """SGLang's notation for one share of this process's cores per rank; ranks share cores where these are too few."""
    cores = sorted(os.sched_getaffinity(0))
    shares = [cores[rank::ranks] or [cores[rank % len(cores)]] for rank in range(ranks)]
    return "|".join(",".join(map(str, share)) for share in shares)
