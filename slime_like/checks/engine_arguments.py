"""Checks of ``rollout.engine_args``. SGLang itself rejects arguments that it does not have."""

import ast
from collections.abc import Collection, Iterator, Mapping
from importlib.util import find_spec
from math import inf
from pathlib import Path

from slime_like.config.rollout import RolloutConfig
from slime_like.config.run import RunConfig
from slime_like.models.dimensions import ModelDimensions


def _refused(adapter: str, **fields: str) -> dict[str, str]:
    """Return the remedy by argument, for arguments that the adapter needs and arguments that fields of ours set."""
    owned = {argument: f"set {field} instead" for argument, field in fields.items()}
    return owned | dict.fromkeys(adapter.split(), "remove it, because the adapter depends on its value")


REFUSED: Mapping[str, Mapping[str, str]] = {
    "vllm": _refused(
        "distributed_executor_backend logprobs_mode max_logprobs worker_extension_cls weight_transfer_config "
        "skip_tokenizer_init enable_log_requests",
        model="model.path",
        dtype="model.dtype",
        trust_remote_code="model.trust_remote_code",
        max_model_len="rollout.max_model_len",
        tensor_parallel_size="rollout.tensor",
        seed="seed",
    ),
    "sglang": _refused(
        "device skip_tokenizer_init sampling_backend weight_version sleep_on_idle custom_sigquit_handler",
        model_path="model.path",
        dtype="model.dtype",
        trust_remote_code="model.trust_remote_code",
        context_length="rollout.max_model_len",
        tp_size="rollout.tensor",
        random_seed="seed",
        dp_size="rollout.num_engines",
        pp_size="rollout.tensor",
    )
    | {
        "nnodes": "an engine's ranks share a host",
        "tokenizer_worker_num": "prompts are token ids already",
        "speculative_algorithm": "its logprobs have not been compared",
        "enable_lora": "weights are updated whole",
        "quantization": "weights arrive in model.dtype",
        "enable_deterministic_inference": "every request already has a separate seed",
        "rl_on_policy_target": "logprobs already use the scaled logits",
    },
}
"""By engine, arguments that its adapter sets or cannot support, with the remedy or the reason."""

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
    default = config.samples_after_saves or not dimensions.attention.reloads or config.rollout.engine not in SHARES
    return bool(config.rollout.own_engine_args.get(WEIGHTS_BACKUP, default))


def copies_weights(config: RunConfig, dimensions: ModelDimensions) -> bool:
    """Return whether an engine copies its weights to host memory at every sleep. vLLM does so only to keep them."""
    if config.rollout.engine == "vllm":
        return not dimensions.attention.reloads
    return can_keep_weights(config, dimensions)


def engine_problems(rollout: RolloutConfig, engine: str | None = None) -> Iterator[str]:
    """Yield one sentence per problem; none for a custom engine. An engine, which runs in ``rollout.python``, gives its
    name."""
    python, engine = None if engine else rollout.python, engine or rollout.engine
    arguments = rollout.engine_args_of(engine)
    refused = REFUSED.get(engine, {})
    known = KNOWN.get(engine) if python is not None or engine != "vllm" else _vllm_arguments()
    for name in arguments:
        if name in refused:
            yield f"rollout.engine_args.{name} is not supported: {refused[name]}"
        elif known is not None and name not in known:
            choices = f"use one of: {', '.join(known)}" if engine in KNOWN else "see `vllm serve --help`"
            yield f"rollout.engine_args.{name} is not an argument of {engine}; {choices}"
    for name, most in ((SHARES.get(engine, ""), 1.0), ("kv_cache_memory_bytes" if engine == "vllm" else "", inf)):
        value = arguments.get(name, 1)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= most:
            yield f"rollout.engine_args.{name}={value} must be a number above 0" + (", at most 1" if most == 1 else "")
    if engine == "transformers" and rollout.tensor != 1:
        yield f"rollout.tensor={rollout.tensor}: the transformers engine runs on one device; use 1, or another engine"


def _vllm_arguments() -> Collection[str] | None:
    """Read vLLM's arguments from its source, because its import takes seconds; ``None`` if it is not installed."""
    if (spec := find_spec("vllm")) is None or spec.origin is None:
        return None
    source = Path(spec.origin).with_name("engine").joinpath("arg_utils.py").read_text(encoding="utf-8")
    parts = [part for node in ast.parse(source).body if isinstance(node, ast.ClassDef) for part in node.body]
    return {ast.unparse(part.target) for part in parts if isinstance(part, ast.AnnAssign)}
