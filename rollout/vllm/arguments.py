"""vLLM's engine arguments from the run's configuration."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from rollout.limits import on_cpu, sequences_at_once, sleep_mode
from rollout.vllm.limits import DRAFTS, LIMITS
from slime_like.config import ModelConfig, RolloutConfig, RunConfig
from slime_like.config.rollout import LARGEST_SUPPORT
from slime_like.errors import EngineError
from slime_like.interfaces.engine import WHOLE, EngineNode
from slime_like.models.dimensions import ModelDimensions
from slime_like.models.tower import has_tower
from slime_like.models.weight_files import header_shapes
from slime_like.plugins.options import load_option
from slime_like.weights.adapter import module_ends
from slime_like.weights.expected_tensors import expected_factors

if TYPE_CHECKING:
    from vllm.engine.arg_utils import AsyncEngineArgs

BACKEND = "slime_like"
"""Name of the weight-transfer backend in vLLM's registry."""
SLEEP_ARGUMENT = "enable_sleep_mode"
LORA_ID = 1
MOST_TIES = 16
"""Additional tokens to request, because vLLM keeps all tokens that tie with the last of the top k."""

_CPU_KV_CACHE_BYTES = 1 << 30
_CPU_BATCHED_TOKENS = 8192


def prepare_environment(rollout: RolloutConfig, part: EngineNode = WHOLE) -> None:
    """Set variables that vLLM and torch read on import. Variables set by the user stay unchanged."""
    # Otherwise, looking for a device initializes CUDA, and vLLM forks its engine process from this one.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    for name, value in environment(rollout, on_cpu(), part).items():
        os.environ.setdefault(name, value)


def environment(rollout: RolloutConfig, cpu: bool, part: EngineNode = WHOLE) -> dict[str, str]:
    """Return the variables by name.

    On a CPU, OpenMP threads are not bound to cores, because engines and trainers share them. A single rank then needs
    no separate process. Eager execution needs no compiler, not even for the small functions vLLM would still compile.
    """
    # Loopback if an engine's ranks share a host, so no other host can reach it.
    shared = {"VLLM_HOST_IP": part.address, "GLOO_SOCKET_IFNAME": part.interface}
    shared |= {**part.store, "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "WARNING", "HF_HUB_OFFLINE": "1"}
    if not cpu:
        # In a process that Ray did not start, vLLM would fork its ranks, which then could not use CUDA.
        return shared | {"VLLM_WORKER_MULTIPROC_METHOD": "spawn"}
    shared["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
    if rollout.ranks == 1:
        shared["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    if rollout.own_engine_args.get("enforce_eager", True):
        shared["TORCHDYNAMO_DISABLE"] = "1"
    return shared


def engine_arguments(config: RunConfig, engine_index: int, part: EngineNode = WHOLE) -> AsyncEngineArgs:
    """Build vLLM's arguments, after ``prepare_environment``. Raises ``EngineError`` if vLLM does not compute the model
    in this type."""
    from vllm.engine.arg_utils import AsyncEngineArgs

    owned = _owned(config, engine_index, part) | LIMITS.lifted_arguments(config.rollout)
    return AsyncEngineArgs(**{**given_arguments(config, on_cpu()), **owned})


def given_arguments(config: RunConfig, cpu: bool) -> dict[str, Any]:
    """Return the user's arguments, and defaults for the others.

    On a GPU, and if distributions are truncated, the head's logits are float32 by default, like the trainer's. vLLM
    would round them to the model's type, in steps of 1/8 above 16. Many logits would be equal, and vLLM keeps all that
    tie with the last of the top k.
    """
    given = {**_defaults(config, cpu), **config.rollout.own_engine_args}
    if not cpu or config.rollout.bounded_top_k > 0:
        given["hf_overrides"] = given.get("hf_overrides") or {"head_dtype": "float32"}
    if given.keys() & DRAFTS:
        given.setdefault("per_request_spec_decode_metrics", "summary")  # for the metric rollout/accepted_length
    if config.sync.quantization != "none":
        settings = load_option("quantized-settings")(header_shapes(config.model.path))
        given["hf_overrides"] = {**(given.get("hf_overrides") or {}), "quantization_config": settings}
        given["load_format"] = "dummy"  # the first update brings 8-bit weights, which model.path does not have
    return given


def returns_masks(config: RunConfig) -> bool:
    """Return whether the engine returns supports as masks, not as the likeliest tokens' logprobs."""
    return bool(given_arguments(config, on_cpu()).get("return_sampling_mask", False))


def sleep_level(keep_weights: bool, is_whole: bool, dimensions: ModelDimensions) -> int:
    """Return 1 to keep the weights in host memory, or 2 to drop them.

    At level 2, vLLM saves and restores only buffers, and the next update brings the parameters. Level 1 is needed to
    keep weights, after an unfinished update (which leaves layers without memory), and for models that may have tensors
    that are neither, such as ALiBi's slopes.
    """
    return 1 if keep_weights or not is_whole or not dimensions.attention.reloads else 2


def _owned(config: RunConfig, engine_index: int, part: EngineNode = WHOLE) -> dict[str, Any]:
    sleeps = sleep_mode(config.rollout, config.cluster, SLEEP_ARGUMENT)
    return {
        "model": str(config.model.path),
        "dtype": config.model.dtype,
        "trust_remote_code": config.model.trust_remote_code,
        "max_model_len": config.max_model_len,
        "tensor_parallel_size": config.rollout.tensor,
        "pipeline_parallel_size": config.rollout.pipeline,
        # In a Ray actor, vLLM would let Ray start its ranks, as if the actor had no devices.
        "distributed_executor_backend": "mp" if config.rollout.ranks > 1 else None,
        **({"nnodes": part.count, "node_rank": part.number} if part.spans else {}),
        **({"master_addr": part.host, "master_port": part.port} if part.spans else {}),
        "seed": config.seed + engine_index,
        # After the temperature. With top-p and top-k off, this is the sampled distribution over the whole vocabulary.
        "logprobs_mode": "processed_logprobs",
        "max_logprobs": LARGEST_SUPPORT + MOST_TIES,
        "worker_extension_cls": "rollout.vllm.worker.WorkerExtension",
        "weight_transfer_config": {"backend": BACKEND},
        "skip_tokenizer_init": True,  # token ids in, token ids out
        "enable_log_requests": False,
        "generation_config": "vllm",  # no defaults of the checkpoint
        **_lora(config.model),
        **(_whole_prefills(config.model) if on_cpu() else {SLEEP_ARGUMENT: sleeps}),
        # On a CPU, ``VllmEngine.refusal`` keeps models with experts from being trained.
        "enable_return_routed_experts": config.algorithm.routing_replay == "rollout" and not on_cpu(),
    }


def _whole_prefills(model: ModelConfig) -> dict[str, Any]:
    """Return the arguments on a CPU. vLLM caches prefixes' recurrent states only between the parts of a prefill."""
    if ModelDimensions.from_checkpoint(model.path).attention.linear is None:
        return {"enable_chunked_prefill": False}
    if model.dtype == "float32":
        problem = "model.dtype=float32: vLLM computes gated delta nets on a CPU only in bfloat16"
        remedy = "set bfloat16, or use rollout.engine=transformers"
        raise EngineError(problem, code="model-not-servable", remedy=remedy)
    return {"enable_chunked_prefill": False, "enable_prefix_caching": False}


def _lora(model: ModelConfig) -> dict[str, Any]:
    """Return the arguments of an adapter. On a CPU, requests without one use the last of ``max_loras`` slots."""
    if not model.lora.sends_factors:
        return {}
    rank = 1 << max(3, ((model.lora.rank or 0) - 1).bit_length())  # vLLM's sizes are powers of two from 8
    modules = module_ends(expected_factors(model))
    return {"enable_lora": True, "max_lora_rank": rank, "max_loras": 2, "lora_target_modules": modules}


def _defaults(config: RunConfig, cpu: bool) -> dict[str, Any]:
    defaults: dict[str, Any] = {"disable_log_stats": True, "max_num_seqs": sequences_at_once(config.rollout)}
    if has_tower(config.model.path):
        defaults["language_model_only"] = True
    if not cpu and config.rollout.ranks > 1 and config.cluster.placement == "colocated":
        # A sleeping engine also frees NCCL's buffers. vLLM ignores this if NCCL is older than 2.29.7.
        defaults["enable_nccl_comm_suspend"] = True
    if cpu:
        defaults |= {
            "enforce_eager": True,
            "block_size": 32,
            "kv_cache_memory_bytes": _CPU_KV_CACHE_BYTES,
            "max_num_batched_tokens": max(_CPU_BATCHED_TOKENS, config.max_model_len),
        }
    elif config.rollout.bounded_top_k > 0 and config.evaluation.temperature == 0:
        # For what samples the whole vocabulary, vLLM's masks are slow, and model runner V1 has none.
        defaults |= {} if os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "0" else {"return_sampling_mask": True}
    return defaults
