"""What ``rollout.engine_args`` must not hold, as far as it is known without importing an engine.

Whether vLLM or SGLang has an argument is looked up in its source. The engine itself has the last word when it starts.
"""

import ast
from collections.abc import Collection, Iterator, Mapping
from difflib import get_close_matches
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path

from slime_like.config.rollout import RolloutConfig
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

_SOURCES: Mapping[str, str] = {"vllm": "engine/arg_utils.py", "sglang": "srt/arg_groups/fields/*.py"}
"""Per engine: files in its package whose classes have its arguments as annotated attributes."""

SHARES: Mapping[str, str] = {"vllm": "gpu_memory_utilization", "sglang": "mem_fraction_static"}
"""Per engine: the argument that says which share of a GPU's memory it takes in all."""

WEIGHTS_BACKUP = "enable_weights_cpu_backup"
"""SGLang's argument that says whether a sleeping engine keeps its weights, which its ``sleep`` cannot choose."""

DEFAULT_SHARES: Mapping[str, float] = {"vllm": 0.92, "sglang": 0.8}
"""Per engine: that share where the arguments do not say. vLLM's is its own. SGLang's is ours, lower than its own: what
its sampler needs for a large batch, logits in float32 and drawing in float64, is no part of the share."""

_CACHE_BYTES = "kv_cache_memory_bytes"


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
    """Each problem one sentence; none for a custom engine.

    Args:
        engine: the engine's name, where it is not ``rollout.engine``.
    """
    rollout = config.rollout
    engine = engine or rollout.engine
    arguments = rollout.engine_args_of(engine)
    refused = REFUSED.get(engine, {})
    known = KNOWN.get(engine, () if rollout.python else arguments_in_source(engine))
    for name in arguments:
        if name in refused:
            yield f"rollout.engine_args.{name} is refused: {refused[name]}"
        elif known and name not in known:
            names = get_close_matches(name, known, cutoff=0.75) or (known if engine in KNOWN else ())
            remedy = f"use one of: {', '.join(names)}" if names else "remove it, or correct its name"
            if name in RolloutConfig.model_fields:
                remedy = f"use rollout.{name}"
            yield f"rollout.engine_args.{name}: the {engine} engine has no such argument; {remedy}"
    share = SHARES.get(engine, "")
    if share in arguments and not (_is_number(arguments[share]) and 0 < arguments[share] <= 1):
        yield f"rollout.engine_args.{share}={arguments[share]} must be a share of a GPU, above 0 and at most 1"
    given = arguments.get(_CACHE_BYTES)
    if engine == "vllm" and given is not None and not (_is_number(given) and given > 0):
        yield f"rollout.engine_args.{_CACHE_BYTES}={given} must be a number of bytes above 0"
    if engine == "transformers" and rollout.tensor != 1:
        yield (
            f"rollout.tensor={rollout.tensor}: the transformers engine runs on one device; use 1, or "
            "rollout.engine=vllm"
        )


@lru_cache(maxsize=8)
def arguments_in_source(engine: str) -> frozenset[str]:
    """Names of the annotated attributes in the engine's sources; none where it is not installed, or has other files."""
    spec = find_spec(engine) if engine in _SOURCES else None
    places = [] if spec is None else list(spec.submodule_search_locations or ())
    files = [file for place in places for file in Path(place).glob(_SOURCES[engine])]
    classes = [node for file in files for node in ast.parse(file.read_bytes()).body if isinstance(node, ast.ClassDef)]
    attributes = [node.target for one in classes for node in one.body if isinstance(node, ast.AnnAssign)]
    return frozenset(target.id for target in attributes if isinstance(target, ast.Name))


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
