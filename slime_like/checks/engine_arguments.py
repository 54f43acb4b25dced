"""Arguments that ``rollout.engine_args`` must not hold. The engine itself rejects arguments that it does not have."""

from collections.abc import Collection, Iterator, Mapping
from math import inf

from slime_like.config.run import RunConfig
from slime_like.models.dimensions import ModelDimensions

_LEFT_TO_THE_ADAPTER = "leave it out, the adapter depends on its value"


def _owned(**fields: str) -> dict[str, str]:
    return {argument: f"set {field} instead" for argument, field in fields.items()}


REFUSED: Mapping[str, Mapping[str, str]] = {
    "vllm": _owned(
        model="model.path",
        dtype="model.dtype",
        trust_remote_code="model.trust_remote_code",
        max_model_len="rollout.max_model_len",
        tensor_parallel_size="rollout.tensor",
        seed="seed",
    )
    | dict.fromkeys(
        [
            "distributed_executor_backend",
            "logprobs_mode",
            "max_logprobs",
            "worker_extension_cls",
            "weight_transfer_config",
            "skip_tokenizer_init",
            "enable_log_requests",
        ],
        _LEFT_TO_THE_ADAPTER,
    ),
    "sglang": _owned(
        model_path="model.path",
        dtype="model.dtype",
        trust_remote_code="model.trust_remote_code",
        context_length="rollout.max_model_len",
        tp_size="rollout.tensor",
        random_seed="seed",
    )
    | dict.fromkeys(
        [
            "device",
            "skip_tokenizer_init",
            "sampling_backend",
            "weight_version",
            "sleep_on_idle",
            "custom_sigquit_handler",
        ],
        _LEFT_TO_THE_ADAPTER,
    )
    | {
        "dp_size": "use rollout.num_engines",
        "pp_size": "use rollout.tensor",
        "nnodes": "an engine's ranks share a host",
        "tokenizer_worker_num": "prompts are token ids already",
        "speculative_algorithm": "its logprobs have not been compared",
        "enable_lora": "weights are updated whole",
        "quantization": "weights arrive in model.dtype",
        "enable_deterministic_inference": "every request already has a separate seed",
        "rl_on_policy_target": "logprobs are those of the scaled logits already",
    },
}
"""Per engine: arguments that its adapter sets itself or cannot serve truthfully, and what to do instead, or why."""

KNOWN: Mapping[str, Collection[str]] = {"transformers": ("attn_implementation", "max_batch_size")}
"""Per engine whose arguments are ours: all of them."""

SHARES: Mapping[str, str] = {"vllm": "gpu_memory_utilization", "sglang": "mem_fraction_static"}
"""Per engine: the argument that says which share of a GPU's memory it takes in all."""

_CACHE_BYTES: Mapping[str, str] = {"vllm": "kv_cache_memory_bytes"}

WEIGHTS_BACKUP = "enable_weights_cpu_backup"
"""SGLang's argument that says whether a sleeping engine keeps its weights, which its ``sleep`` cannot choose."""

DEFAULT_SHARES: Mapping[str, float] = {"vllm": 0.92, "sglang": 0.8}
"""Per engine: that share where the arguments do not say. vLLM's is its own. SGLang's is ours, lower than its own: what
its sampler needs for a large batch, logits in float32 and drawing in float64, is no part of the share."""


def can_keep_weights(config: RunConfig, dimensions: ModelDimensions) -> bool:
    """Whether an engine must be able to sleep with its weights, in host memory.

    Sampling after a checkpoint needs it; so do foreign models, whose tensors are not all parameters and buffers.
    """
    default = config.samples_after_saves or dimensions.foreign is not None or config.rollout.engine not in SHARES
    return bool(config.rollout.own_engine_args.get(WEIGHTS_BACKUP, default))


def copies_weights(config: RunConfig, dimensions: ModelDimensions) -> bool:
    """Whether an engine copies its weights to host memory at every sleep; vLLM does so only where they are kept."""
    if config.rollout.engine == "vllm":
        return dimensions.foreign is not None
    return can_keep_weights(config, dimensions)


def engine_problems(config: RunConfig, engine: str | None = None) -> Iterator[str]:
    """Yield one sentence per problem; none for a custom engine. Engines themselves reject arguments that they lack.

    Args:
        engine: the engine's name if it is not ``rollout.engine``.
    """
    rollout = config.rollout
    engine = engine or rollout.engine
    arguments = rollout.engine_args_of(engine)
    refused, known = REFUSED.get(engine, {}), KNOWN.get(engine)
    for name in arguments:
        if name in refused:
            yield f"rollout.engine_args.{name} is refused: {refused[name]}"
        elif known is not None and name not in known:
            yield (
                f"rollout.engine_args.{name}: the {engine} engine has no such argument; use one of: {', '.join(known)}"
            )
    for name, most in ((SHARES.get(engine, ""), 1.0), (_CACHE_BYTES.get(engine, ""), inf)):
        value = arguments.get(name, 1)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= most:
            yield f"rollout.engine_args.{name}={value} must be a number above 0, and at most {most:g}"
    if engine == "transformers" and rollout.tensor != 1:
        yield (
            f"rollout.tensor={rollout.tensor}: the transformers engine runs on one device; use 1, or "
            "rollout.engine=vllm"
        )
