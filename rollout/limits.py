"""Limits and arguments that our engines share. Importing this imports neither an engine nor torch."""

from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from fnmatch import fnmatch
from typing import Any

from slime_like.config.rollout import RolloutConfig
from slime_like.config.run import RunConfig
from slime_like.config.sections import ClusterConfig, ModelConfig
from slime_like.interfaces.engine_limits import EngineLimits
from slime_like.models.dimensions import ModelDimensions
from slime_like.models.weight_files import WeightFilesError, model_shapes
from slime_like.weights.adapter import factor_shapes

_MOST_SEQUENCES = 512

MERGED = "use model.lora.sync=merged"
CHANGES: Mapping[str, str] = {
    "the logprobs of drafted tokens have not been compared": "spec_* speculative_* decoupled_spec_* *eagle* *dllm* "
    "diffusion_config",
    "adapters are described by model.lora": "*lora*",
    "weights, activations and caches have the type model.dtype": "*quant* *dtype* *fp4* *fp8* *int8* *tf32* modelopt_* "
    "*stochastic_rounding *a2a_* kt_*",
    "the engine must compute what the trainer computes, from the files of model.path": "load_format model_impl "
    "model_weights hf_config_path hf_overrides json_model_override_args model_class_overrides config_format "
    "model_config_parser runner convert pooler_config is_embedding *revision custom_weight_loader weight_cache_mode "
    "checkpoint_engine_* decrypted_* delete_ckpt_* forward_hooks *hisparse* disable_sliding_window "
    "kv_sharing_fast_prefill",
    "requests set the sampled distribution": "override_generation_config preferred_sampling_params *logit*_processor* "
    "watermark_* enable_watermark enable_strict_thinking",
    "prompts and responses are token ids": "tokenizer tokenizer_mode tokenizer_path *tokenizer_worker_num",
    "cluster.gpus_per_node sets an engine's nodes": "nnodes node_rank master_* dist_init_addr use_ray",
    "rollout.tensor, pipeline and num_engines set the ranks": "pp_size *context_parallel_size data_parallel_* "
    "*dp_size *cp_size *dp_attention* enable_prefill_cp",
    "weight updates need every expert in its place": "*eplb* *elastic_ep* *redundant_experts init_expert_location "
    "*paged_experts",
    "its keys and values would outlive a weight update": "*_transfer_config kv_offloading_* disaggregation_mode "
    "hicache_storage_* enable_lmcache enable_flexkv *external_linker",
}
"""By reason, patterns of vLLM's and SGLang's arguments that would change the model, the sampled distribution or the
layout of ranks. Their values that change nothing (``_change_problems``) are allowed."""

_UNCHANGED: Collection[Any] = (None, False, "", "auto", "none", "null", "safetensors", "fastsafetensors", "{}", {}, [])


def owned_arguments(adapter: str, **fields: str) -> dict[str, str]:
    """Return the remedy for each argument that the adapter needs, or that a field of the configuration sets."""
    owned = {argument: f"set {field} instead" for argument, field in fields.items()}
    return owned | dict.fromkeys(adapter.split(), "remove it, because the adapter depends on its value")


@dataclass(frozen=True, kw_only=True)
class OwnLimits(EngineLimits):
    """Limits of an engine of this distribution."""

    def adapter_problems(self, model: ModelConfig, dimensions: ModelDimensions) -> Iterator[str]:
        with suppress(WeightFilesError):  # another check reports it
            names = factor_shapes(model.lora, model_shapes(model.path))
            if dimensions.num_experts and any(".self_attn." not in name for name in names):
                problem = f"{self.name} applies factors only to attention in a model with experts"
                yield f"model.lora.targets={list(model.lora.targets)}: {problem}; target attention, or {MERGED}"


@dataclass(frozen=True, kw_only=True)
class ServerLimits(OwnLimits):
    """Limits of vLLM or SGLang.

    Attributes:
        owned: arguments that the adapter sets, whatever the value, with the remedy or the reason.
    """

    owned: Mapping[str, str] = field(default_factory=dict)
    spans_nodes: bool = True
    splits_heads: bool = True

    def argument_problems(self, rollout: RolloutConfig, is_here: bool) -> Iterator[str]:
        arguments = rollout.engine_args_of(self.name)
        known = self.known_arguments() if arguments and is_here else None
        for name, value in arguments.items():
            if name in self.owned:
                yield f"rollout.engine_args.{name} is not supported: {self.owned[name]}"
            elif known is not None and name not in known:
                yield f"rollout.engine_args.{name} is not an argument of {self.name}; see `{self.name} serve --help`"
            else:
                yield from _change_problems(name, value)
        share = arguments.get(self.share_argument, 1)
        if not (is_number(share) and share <= 1):
            yield f"rollout.engine_args.{self.share_argument}={share} must be a number above 0, at most 1"

    def known_arguments(self) -> Collection[str] | None:
        """Return the names of all arguments; ``None`` if the engine rejects others itself, or is not installed."""
        return None

    def adapter_problems(self, model: ModelConfig, dimensions: ModelDimensions) -> Iterator[str]:
        if special := dimensions.attention.special:
            yield f"model.lora.sync=adapter: {self.name} may compute {special} without the factors; {MERGED}"
        if dimensions.tower:
            yield f"model.lora.sync=adapter: {self.name} may not find the modules of a model with a tower; {MERGED}"
        yield from OwnLimits.adapter_problems(self, model, dimensions)

    def quantization_problem(self, on_cuda: bool) -> str | None:
        return None if on_cuda else f"{self.name} has no 8-bit products on a CPU; use rollout.engine=transformers"

    def keeps_weights(self, config: RunConfig, dimensions: ModelDimensions) -> bool:
        return config.samples_after_saves or must_stay(config, dimensions)


def is_number(value: Any) -> bool:
    """Return whether the value is a number above 0."""
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0


def must_stay(config: RunConfig, dimensions: ModelDimensions) -> bool:
    """Return whether an update does not replace every tensor, so an engine must not drop its weights."""
    return config.model.lora.sends_factors or not dimensions.attention.reloads


def _change_problems(name: str, value: Any) -> Iterator[str]:
    """Yield one sentence per argument, also inside mappings, with a value that changes something (``CHANGES``)."""
    argument = name.rpartition(".")[2]
    if value in _UNCHANGED or (value == 1 and argument.endswith(("_size", "nnodes"))):
        return
    if name == "hf_overrides" and isinstance(value, Mapping) and set(value) == {"head_dtype"}:
        return
    reasons = [why for why, patterns in CHANGES.items() if any(fnmatch(argument, each) for each in patterns.split())]
    if reasons:
        yield f"rollout.engine_args.{name}={value} is not supported: {reasons[0]}; remove it"
    elif isinstance(value, Mapping):
        for key, part in value.items():
            yield from _change_problems(f"{name}.{key}", part)


def on_cpu() -> bool:
    import torch

    return not torch.cuda.is_available()


def sequences_at_once(rollout: RolloutConfig) -> int:
    return min(rollout.max_concurrent_requests * rollout.samples_per_prompt, _MOST_SEQUENCES)


def sleep_mode(rollout: RolloutConfig, cluster: ClusterConfig, argument: str) -> bool:
    """Return whether the engine must be able to release its memory: by its ``argument``, else on shared devices."""
    return bool(rollout.own_engine_args.get(argument, cluster.placement == "colocated"))
