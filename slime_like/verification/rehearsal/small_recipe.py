"""Small version of a recipe: other sizes, but the same method, data, template, rewards and parallel axes."""

from pathlib import Path
from typing import Any

from slime_like.config import ParallelConfig, RolloutConfig, RunConfig, TrainerConfig
from slime_like.config.part import Part
from slime_like.config.sections import CriticConfig, FrozenModelConfig
from slime_like.models.dimensions import ModelDimensions

RANKS = 8
"""Maximum number of trainer ranks."""
NEW_TOKENS = 32
"""Maximum tokens of a response, or of one turn of a conversation."""
_TURNS = 3

_AXES = ("tensor", "pipeline", "context", "data", "expert", "virtual_pipeline")


def small_recipe(config: RunConfig, model: Path, run_dir: Path, steps: int) -> RunConfig:
    """Return the recipe with ``model`` instead of the real one, and with parallel axes of at most 2.

    It runs on CPUs, so settings that only GPUs support get their defaults.
    """
    raw, algorithm = config.model_dump(mode="json"), config.algorithm
    prompt = config.data.max_prompt_tokens
    new_tokens, length = _lengths(config.rollout, prompt)
    budget = max(512, length or prompt + new_tokens)
    more: dict[str, Any] = {
        "run_dir": str(run_dir),
        "steps": steps,
        "resume": "auto",
        "model": {"path": str(model), "weights": None, "dtype": "float32", "lora": {"path": None}},
        "rollout": _rollout(config.rollout, new_tokens, length, 8 if config.supervised else 4),
        "reward": {"workers": min(2, config.reward.workers)},
        "sync": {
            "transport": "auto" if config.sync.transport in ("nccl", "colocated") else config.sync.transport,
            "quantization": config.sync.quantization if config.rollout.engine == "transformers" else "none",
        },
        "evaluation": {
            "every": steps if config.evaluation.files else 0,
            "max_prompts": 4,
            "samples_per_prompt": 1,
            "max_new_tokens": None,
        },
        "algorithm": {
            "minibatches": min(2, algorithm.minibatches),
            "reduction": _reduction(algorithm.reduction, new_tokens),
            "overlong": {"buffer": _at_most(max(1, new_tokens // 2), algorithm.overlong.buffer)},
        },
        "trainer": _trainer(config.trainer, budget),
        "reference": _frozen(config.reference, algorithm.needs_reference, model),
        "distillation": _frozen(config.distillation, config.distillation.is_set, model)
        | {"teachers": dict.fromkeys(config.distillation.teachers, str(model))},
        "critic": _critic(config.critic, config.trainer.parallel),
        "checkpoint": {"every": 1, "keep": 2, "export_hf": True},
        "logging": {"wandb": False, "progress": "plain"},
        "debug": {"save_rollouts": None, "load_rollouts": None, "samples_per_step": 4, "tables_every": 1},
        "cluster": {"address": None, "nodes": None},
    }
    return RunConfig.model_validate(_merged(raw, more))


def _lengths(rollout: RolloutConfig, prompt: int) -> tuple[int, int | None]:
    """Return the maximum tokens of a response and of a sequence. An agent's sequences keep their length, because its
    prompt may need it."""
    talks = rollout.environment.name is not None
    new_tokens = min(rollout.max_new_tokens, NEW_TOKENS * (_TURNS if talks else 1))
    if rollout.agent.is_set or rollout.max_model_len is None:
        return new_tokens, rollout.max_model_len
    observed = (_TURNS - 1) * rollout.environment.max_observation_tokens if talks else 0
    return new_tokens, min(rollout.max_model_len, prompt + new_tokens + observed)


def _rollout(rollout: RolloutConfig, new_tokens: int, length: int | None, samples: int) -> dict[str, Any]:
    environment = rollout.environment
    small: dict[str, Any] = {
        "num_engines": 1,
        "tensor": min(2, rollout.tensor),
        "pipeline": 1,
        "prompts_per_step": min(4, rollout.prompts_per_step),
        "samples_per_prompt": min(samples, rollout.samples_per_prompt),
        "max_new_tokens": new_tokens,
        "max_model_len": length,
        "engine_args": {},
    }
    if environment.name is not None:
        small["environment"] = {
            "max_turns": min(_TURNS, environment.max_turns),
            "max_turn_tokens": _at_most(min(NEW_TOKENS, rollout.max_new_tokens), environment.max_turn_tokens),
            "workers": min(2, environment.workers),
        }
    if rollout.agent.is_set:
        small["agent"] = {"workers": min(4, rollout.agent.workers)}
    return small


def _critic(critic: CriticConfig, policy: ParallelConfig) -> dict[str, Any]:
    """Return a critic without its own checkpoint. It warms up for at most the first of the steps."""
    small: dict[str, Any] = {"path": None, "warmup_steps": min(1, critic.warmup_steps), "optimizer": {"offload": False}}
    return small | ({} if critic.parallel is None else {"parallel": _small_axes(critic.layout(policy))})


def _trainer(trainer: TrainerConfig, budget: int) -> dict[str, Any]:
    return {
        "parallel": _small_axes(trainer.parallel),
        "attention": "auto" if trainer.attention == "transformer_engine" else trainer.attention,
        "target_tokens_per_batch": min(budget, trainer.target_tokens_per_batch),
        "head_chunk_tokens": None,
        "activation_offload": False,
        "optimizer": {"offload": False, "warmup_steps": min(1, trainer.optimizer.warmup_steps)},
        "cpu_threads": None,
    }


def _frozen(frozen: FrozenModelConfig, is_needed: bool, model: Path) -> dict[str, Any]:
    small = dict[str, Any]()
    if frozen.path is not None:
        small["path"] = str(model)
    if is_needed and frozen.placement == "workers":
        small |= {"workers": 1, "parallel": _small_axes(frozen.parallel)}
    return small


def _reduction(reduction: Part, new_tokens: int) -> dict[str, Any]:
    small = reduction.model_dump()
    return small | {"length": min(new_tokens, small["length"])} if "length" in small else small


def _at_most(limit: int, value: int | None) -> int | None:
    return None if value is None else min(limit, value)


def layers_of(parallel: ParallelConfig, dimensions: ModelDimensions) -> int:
    """Return the layers of the small model: one for every chunk of the small pipeline, at least two."""
    small = _small_axes(parallel)
    chunks = small["pipeline"] * small["virtual_pipeline"]
    return max(2, chunks - min(1, dimensions.dense_layers))


def _small_axes(parallel: ParallelConfig) -> dict[str, Any]:
    small = parallel.model_dump()
    small |= {axis: min(2, small[axis]) for axis in _AXES}
    while small["tensor"] * small["pipeline"] * small["context"] * small["data"] > RANKS:
        small["data"] = 1
    return small


def _merged(base: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    both = dict(base)
    for key, value in more.items():
        nested = isinstance(value, dict) and value and isinstance(both.get(key), dict)
        both[key] = _merged(both[key], value) if nested else value
    return both
