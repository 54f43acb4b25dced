"""SGLang's engine arguments and environment from the run's configuration. Importing this imports no SGLang."""

import json
import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch

from rollout.limits import on_cpu, sequences_at_once, sleep_mode
from rollout.sglang.limits import LIMITS, WEIGHTS_BACKUP
from slime_like.checks.packages import expandable_segments
from slime_like.config import ClusterConfig, ModelConfig, RolloutConfig, RunConfig
from slime_like.errors import EngineError
from slime_like.interfaces.engine import WHOLE, EngineNode
from slime_like.models.dimensions import ModelDimensions
from slime_like.models.tower import has_tower
from slime_like.models.weight_files import header_shapes
from slime_like.weights.adapter import module_ends
from slime_like.weights.expected_tensors import expected_factors
from slime_like.weights.quantization import checkpoint_settings

SLEEP_ARGUMENT = "enable_memory_saver"
SAMPLING_BACKEND = "pytorch"
"""Backend that ``rollout.sglang.sampler.SeededSampler`` replaces, and SGLang's only one on a CPU."""

_CPU_KV_CACHE_BYTES = 1 << 30
_SPARE_POSITIONS = 8
"""Added to the context length, because SGLang ends a sequence a few positions before it."""


def environment(rollout: RolloutConfig, scratch: Path, part: EngineNode = WHOLE) -> dict[str, str]:
    """Return the variables of SGLang's process and its children. Variables set by the user stay unchanged.

    An engine's ranks meet in a file if they share a host, because torch's TCP store would listen on every interface. On
    a CPU, eager execution needs no compiler, and by default a rank has one thread.
    """
    meeting = "env://" if part.spans else f"file://{scratch}/rendezvous"
    defaults = {"HF_HUB_OFFLINE": "1", "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1"}
    defaults |= {"GLOO_SOCKET_IFNAME": part.interface, "SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE": meeting}
    if part.spans:
        defaults |= {"SGLANG_HOST_IP": part.address, "SGLANG_BLOCK_NONZERO_RANK_CHILDREN": "0"}
    if on_cpu():
        defaults |= {"SGLANG_USE_CPU_ENGINE": "1", "TORCHDYNAMO_DISABLE": "1", "OMP_NUM_THREADS": "1"}
        if rollout.tensor > 1:
            defaults |= {"SGLANG_CPU_OMP_THREADS_BIND": _cores(rollout.tensor)}
    return {**defaults, **os.environ, **part.store}


def memory_saver_problem(rollout: RolloutConfig, cluster: ClusterConfig, environment: Mapping[str, str]) -> str | None:
    """Return why SGLang could not release GPU memory: its memory saver does not support expandable segments."""
    given = expandable_segments(environment)
    if given is None or not sleep_mode(rollout, cluster, SLEEP_ARGUMENT):
        return None
    return f"{given} in the environment is not supported by SGLang's memory saver"


def engine_arguments(
    config: RunConfig, engine_index: int, known: Collection[str], part: EngineNode = WHOLE
) -> dict[str, Any]:
    """Return SGLang's arguments. Raises ``EngineError`` if one in ``rollout.engine_args`` is not ``known``."""
    given = config.rollout.own_engine_args
    if unknown := sorted(given.keys() - known):
        problem, remedy = "SGLang has no such argument", "see `python -m sglang.launch_server --help`"
        raise EngineError(f"rollout.engine_args.{unknown[0]}: {problem}", code="engine-arguments", remedy=remedy)
    return {
        **_defaults(config.model, config.rollout, config.max_model_len),
        **given,
        **_owned(config, engine_index, part),
        **LIMITS.lifted_arguments(config.rollout),
    }


def _owned(config: RunConfig, engine_index: int, part: EngineNode) -> dict[str, Any]:
    sleeps = sleep_mode(config.rollout, config.cluster, SLEEP_ARGUMENT)
    keeps = LIMITS.keeps_weights(config, ModelDimensions.from_checkpoint(config.model.path))
    return {
        "model_path": str(config.model.path),
        "dtype": config.model.dtype,
        "trust_remote_code": config.model.trust_remote_code,
        "context_length": config.max_model_len + _SPARE_POSITIONS,
        "tp_size": config.rollout.tensor,
        "nnodes": part.count,
        "node_rank": part.number,
        "random_seed": config.seed + engine_index,
        "device": "cpu" if on_cpu() else "cuda",
        "skip_tokenizer_init": True,  # token ids in, token ids out
        "sampling_backend": SAMPLING_BACKEND,
        "weight_version": "0",
        "sleep_on_idle": True,  # engines and trainers may share cores
        "enable_return_routed_experts": config.algorithm.routing_replay == "rollout",
        **_lora(config.model),
        **(_quantization(config.model) if config.sync.quantization != "none" else {}),
        **({} if on_cpu() else {SLEEP_ARGUMENT: sleeps, WEIGHTS_BACKUP: sleeps and keeps}),
    }


def _lora(model: ModelConfig) -> dict[str, Any]:
    """Return the arguments of an adapter. Requests without one count as another."""
    if not model.lora.sends_factors:
        return {}
    arguments: dict[str, Any] = {"enable_lora": True, "max_lora_rank": model.lora.rank, "max_loras_per_batch": 2}
    arguments |= {"lora_target_modules": module_ends(expected_factors(model)), "lora_strict_loading": True}
    return arguments | ({"lora_backend": "torch_native"} if on_cpu() else {})


def _quantization(model: ModelConfig) -> dict[str, Any]:
    """Return the arguments of 8-bit weights, which the first update brings.

    On some GPUs, DeepGEMM would round the scales to powers of two after the start, but not after an update.
    """
    settings = {"quantization_config": checkpoint_settings(header_shapes(model.path))}
    arguments = {"load_format": "dummy", "json_model_override_args": json.dumps(settings)}
    return arguments | {"fp8_gemm_runner_backend": "triton", "moe_runner_backend": "triton"}


def _defaults(model: ModelConfig, rollout: RolloutConfig, longest: int) -> dict[str, Any]:
    defaults: dict[str, Any] = {
        "log_level": "error",
        "grammar_backend": "none",
        "max_running_requests": sequences_at_once(rollout),
    }
    if has_tower(model.path):
        defaults["enable_multimodal"] = False
    if on_cpu():
        defaults |= {
            "attention_backend": "torch_native",
            "disable_cuda_graph": True,
            "disable_overlap_schedule": True,
            "max_total_tokens": _cpu_tokens(model, sequences_at_once(rollout), longest + _SPARE_POSITIONS),
        }
    else:
        defaults[LIMITS.share_argument] = LIMITS.default_share
    return defaults


def _cpu_tokens(model: ModelConfig, sequences: int, longest: int) -> int:
    """Return the KV cache's tokens: enough for all concurrent requests, within a budget, and for two sequences."""
    dimensions = ModelDimensions.from_checkpoint(model.path)
    item = getattr(torch, model.dtype).itemsize
    per_token = 2 * dimensions.num_layers * dimensions.num_kv_heads * dimensions.head_dim * item
    return max(2 * longest, min(_CPU_KV_CACHE_BYTES // per_token, sequences * longest))


def _cores(ranks: int) -> str:
    """Return this process's cores by rank, in SGLang's notation. Ranks share cores if there are too few."""
    cores = sorted(os.sched_getaffinity(0))
    shares = [cores[rank::ranks] or [cores[rank % len(cores)]] for rank in range(ranks)]
    return "|".join(",".join(map(str, share)) for share in shares)
