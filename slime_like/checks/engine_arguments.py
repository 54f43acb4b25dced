"""Checks of ``rollout.engine_args``. SGLang itself rejects arguments that it does not have."""

import ast
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from fnmatch import fnmatch
from functools import cache
from importlib.util import find_spec
from math import inf
from pathlib import Path
from typing import Any

from slime_like.config.rollout import RolloutConfig
from slime_like.config.run import RunConfig
from slime_like.config.sections import ModelConfig
from slime_like.models.dimensions import ModelDimensions
from slime_like.models.weight_files import WeightFilesError, model_shapes
from slime_like.weights.adapter import factor_shapes


def _owned(adapter: str, **fields: str) -> dict[str, str]:
    """Return the remedy by argument, for arguments that the adapter needs and arguments that fields of ours set."""
    owned = {argument: f"set {field} instead" for argument, field in fields.items()}
    return owned | dict.fromkeys(adapter.split(), "remove it, because the adapter depends on its value")


OWNED: Mapping[str, Mapping[str, str]] = {
    "vllm": _owned(
        "distributed_executor_backend logprobs_mode max_logprobs worker_extension_cls weight_transfer_config "
        "skip_tokenizer_init enable_log_requests generation_config",
        model="model.path",
        dtype="model.dtype",
        trust_remote_code="model.trust_remote_code",
        max_model_len="rollout.max_model_len",
        tensor_parallel_size="rollout.tensor",
        pipeline_parallel_size="rollout.pipeline",
        seed="seed",
        enable_return_routed_experts="algorithm.routing_replay",
    ),
    "sglang": _owned(
        "device skip_tokenizer_init sampling_backend weight_version sleep_on_idle custom_sigquit_handler",
        model_path="model.path",
        dtype="model.dtype",
        trust_remote_code="model.trust_remote_code",
        context_length="rollout.max_model_len",
        tp_size="rollout.tensor",
        random_seed="seed",
        enable_return_routed_experts="algorithm.routing_replay",
    )
    | {
        "enable_deterministic_inference": "every request already has a separate seed",
        "rl_on_policy_target": "logprobs already use the scaled logits",
    },
}
"""By engine, arguments that its adapter sets, whatever the value, with the remedy or the reason."""

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
layout of ranks. Their values that change nothing (``_changes``) are allowed."""

_UNCHANGED: Collection[Any] = (None, False, "", "auto", "none", "null", "safetensors", "fastsafetensors", "{}", {}, [])

KNOWN: Mapping[str, Collection[str]] = {"transformers": ("attn_implementation", "max_batch_size")}
"""All arguments of the engines that are ours."""

SHARES: Mapping[str, str] = {"vllm": "gpu_memory_utilization", "sglang": "mem_fraction_static"}
"""By engine, the argument that sets its share of a GPU's memory."""

WEIGHTS_BACKUP = "enable_weights_cpu_backup"
"""SGLang's argument that decides whether a sleeping engine keeps its weights. Its ``sleep`` cannot choose."""

DEFAULT_SHARES: Mapping[str, float] = {"vllm": 0.92, "sglang": 0.8}
"""By engine, the default share. vLLM's is its own default. SGLang's is below its default, because its sampler needs
memory outside the share for a large batch: logits in float32, and sampling in float64."""


def can_keep_weights(config: RunConfig, dimensions: ModelDimensions) -> bool:
    """Return whether an engine must be able to sleep with its weights in host memory.

    Sampling after a checkpoint needs it. So do models of which an update does not replace every tensor.
    """
    stays = config.model.lora.sends_factors or not dimensions.attention.reloads
    default = config.samples_after_saves or stays or config.rollout.engine not in SHARES
    return bool(config.rollout.own_engine_args.get(WEIGHTS_BACKUP, default))


def copies_weights(config: RunConfig, dimensions: ModelDimensions) -> bool:
    """Return whether an engine copies its weights to host memory at every sleep. vLLM does so only to keep them."""
    if config.rollout.engine == "vllm":
        return config.model.lora.sends_factors or not dimensions.attention.reloads
    return can_keep_weights(config, dimensions)


def engine_problems(rollout: RolloutConfig, engine: str | None = None) -> Iterator[str]:
    """Yield one sentence per problem; none for a custom engine. An engine, which runs in ``rollout.python``, gives its
    name."""
    python, engine = None if engine else rollout.python, engine or rollout.engine
    arguments = rollout.engine_args_of(engine)
    owned = OWNED.get(engine, {})
    known = _vllm_arguments() if arguments and engine == "vllm" and python is None else KNOWN.get(engine)
    for name, value in arguments.items():
        if name in owned:
            yield f"rollout.engine_args.{name} is not supported: {owned[name]}"
        elif known is not None and name not in known:
            choices = f"use one of: {', '.join(known)}" if engine in KNOWN else "see `vllm serve --help`"
            yield f"rollout.engine_args.{name} is not an argument of {engine}; {choices}"
        elif engine in OWNED:
            yield from _changes(name, value)
    for name, most in ((SHARES.get(engine, ""), 1.0), ("kv_cache_memory_bytes" if engine == "vllm" else "", inf)):
        value = arguments.get(name, 1)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= most:
            yield f"rollout.engine_args.{name}={value} must be a number above 0" + (", at most 1" if most == 1 else "")
    if engine == "transformers" and rollout.tensor != 1:
        yield f"rollout.tensor={rollout.tensor}: the transformers engine runs on one device; use 1, or another engine"
    if engine in ("transformers", "sglang") and rollout.pipeline != 1:
        problem = "SGLang 0.5.23 cannot freeze a pipeline's requests" if engine == "sglang" else "it has no stages"
        yield f"rollout.pipeline={rollout.pipeline}: {problem}; use rollout.tensor, or rollout.engine=vllm"


def adapter_problems(model: ModelConfig, engine: str, dimensions: ModelDimensions) -> Iterator[str]:
    """Check that the engine can apply the factors; none for a custom engine."""
    lora, remedy = model.lora, "use model.lora.sync=merged"
    if not lora.sends_factors:
        return
    if engine == "vllm" and (lora.rank or 0) > 512:
        yield f"model.lora.rank={lora.rank}: vLLM applies factors of rank 512 at most; lower it, or {remedy}"
    if engine in OWNED and (special := dimensions.attention.special):
        yield f"model.lora.sync=adapter: {engine} may compute {special} without the factors; {remedy}"
    if engine in OWNED and dimensions.tower:
        yield f"model.lora.sync=adapter: {engine} may not find the modules of a model with a tower; {remedy}"
    with suppress(WeightFilesError):  # another check reports it
        names = factor_shapes(lora, model_shapes(model.path))
        has_others = dimensions.num_experts and any(".self_attn." not in name for name in names)
        if has_others and engine in (*OWNED, *KNOWN):
            problem = f"{engine} applies factors only to attention in a model with experts"
            yield f"model.lora.targets={list(lora.targets)}: {problem}; target attention, or {remedy}"


def _changes(name: str, value: Any) -> Iterator[str]:
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
            yield from _changes(f"{name}.{key}", part)


def _vllm_arguments() -> Collection[str] | None:
    """Read vLLM's arguments from its source, because its import takes seconds; ``None`` if it is not installed."""
    if (spec := find_spec("vllm")) is None or spec.origin is None:
        return None
    return _fields_in(Path(spec.origin).with_name("engine") / "arg_utils.py")


@cache
def _fields_in(source: Path) -> Collection[str]:
    """Return the names of all annotated fields of the classes in a source file."""
    classes = [node for node in ast.parse(source.read_text(encoding="utf-8")).body if isinstance(node, ast.ClassDef)]
    return {ast.unparse(part.target) for one in classes for part in one.body if isinstance(part, ast.AnnAssign)}
