"""A small run of a recipe on this machine: steps, a kill, a resume and an export.

A small random model like the real one is trained with a small version of the recipe: other sizes, but the same method,
data, rows, template, rewards and parallel axes.
"""

import re
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import transformers

from slime_like.checks import training_needs
from slime_like.checks.check import check_settings
from slime_like.config import ModelConfig, ParallelConfig, RolloutConfig, RunConfig, TrainerConfig
from slime_like.config.reading.load import save_config
from slime_like.config.sections import FrozenModelConfig
from slime_like.data.ledger import audit_run
from slime_like.errors import ConfigError, SlimeLikeError
from slime_like.examples.look_alike import make_look_alike
from slime_like.examples.tiny_model import without_progress_bar
from slime_like.interfaces.engine_limits import engine_limits
from slime_like.models.dimensions import ModelDimensions
from slime_like.models.tokenization import load_tokenizer
from slime_like.models.tower import loading_options
from slime_like.models.weight_files import header_shapes
from slime_like.observability.metrics import METRICS_FILE, read_metrics
from slime_like.orchestration.rollout.requests import stop_tokens
from slime_like.system.interrupts import raise_if_interrupted
from slime_like.system.processes import child_command
from slime_like.system.words import pluralize
from slime_like.weights.adapter import stored_factors
from slime_like.weights.expected_tensors import expected_factors

_START_S, _REST_S, _STOP_S = 900.0, 1800.0, 120.0
_LOOK_EVERY_S = 0.2
_ERROR = re.compile(r"^(?:slime-like: |  - )(.*\[[a-z][a-z.-]+\])$", re.MULTILINE)
_FAILURES = ("ref_actor_rewards/scoring_failures", "evaluation/scoring_failures")


class Outcome(NamedTuple):
    """One line of a rehearsal."""

    is_sound: bool
    stage: str
    text: str


def rehearse(config: RunConfig, directory: Path, steps: int) -> Iterator[Outcome]:
    """Run a small version of a recipe, in stages. A failed start or resume ends the rehearsal.

    Args:
        directory: empty directory for the small model, the small recipe, its run and the logs.
        steps: training steps of the small run, at least 2.

    Raises ``ConfigError`` if the recipe's settings are invalid, or it has no small version.
    """
    dimensions = ModelDimensions.from_checkpoint(config.model.path)
    if problems := check_settings(config, dimensions, training_needs(config)):
        raise ConfigError(problems)
    yield Outcome(True, "settings", f"valid for {pluralize(config.trainer.parallel.world_size, 'rank')}")
    model = directory / "model"
    ends = [token for token in stop_tokens(config.rollout, config.model) if 0 <= token < dimensions.vocab_size]
    make_look_alike(config.model.path, model, layers_of(config.trainer.parallel, dimensions), ends=ends)
    try:
        small = small_recipe(config, model, directory / "run", steps)
    except ValueError as error:
        raise ConfigError(f"this recipe cannot be made small ({error})", code="rehearsal-size") from error
    save_config(small, directory / "recipe.yaml")
    latest = small.run_dir / "checkpoints" / "latest"
    problem = _train(directory, "first.log", _START_S, stop=latest.exists)
    yield Outcome(problem is None, "first steps", problem or "wrote a checkpoint; the run was killed")
    if problem is None:
        problem = _train(directory, "second.log", _REST_S)
        yield Outcome(problem is None, "resume", problem or f"finished {steps} steps")
    if problem is None:
        yield from _records(small.run_dir, steps, small.supervised)
        yield _export(small.run_dir / "hf", small.model)


def _train(directory: Path, name: str, timeout_s: float, stop: Callable[[], bool] = lambda: False) -> str | None:
    """Run ``slime-like train`` until it ends, or kill it when ``stop()`` is true. Return the problem, if any."""
    log, end = directory / name, time.monotonic() + timeout_s
    command = child_command(["train", str(directory / "recipe.yaml")])
    with log.open("wb") as file:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True)
    try:
        while process.poll() is None and not stop():
            raise_if_interrupted()
            if time.monotonic() > end:
                return f"not finished after {timeout_s:.0f} s; see {log}"
            time.sleep(_LOOK_EVERY_S)
        if process.poll() in (None, 0):
            return None
    finally:
        process.kill()
        process.wait(_STOP_S)
    errors = _ERROR.findall(log.read_text(encoding="utf-8", errors="replace"))
    return "; ".join(errors) or f"ended with exit code {process.returncode}; see {log}"


def _records(run_dir: Path, steps: int, supervised: bool) -> Iterator[Outcome]:
    """Check that every step was logged, every response was scored and every group is accounted for."""
    records = read_metrics(run_dir / METRICS_FILE)
    trained = sorted({record["step"] for record in records if "train_actor_training/loss" in record})
    yield Outcome(trained == list(range(1, steps + 1)), "metrics", f"logged steps: {trained}")
    if supervised:
        return
    failed = sum(int(record.get(name, 0)) for record in records for name in _FAILURES)
    where = f"; the reasons are in {run_dir / 'driver.log'}" if failed else ""
    yield Outcome(not failed, "scoring", f"{pluralize(failed, 'response')} failed{where}")
    audit = audit_run(run_dir)
    text = f"{pluralize(audit.issued, 'group')} issued, {audit.trained} trained"
    yield Outcome(not audit.problems, "ledger", "; ".join([text, *audit.problems]))


def _export(path: Path, trained: ModelConfig) -> Outcome:
    """Load the exported model like a user."""
    try:
        if trained.lora.is_set:
            found = header_shapes(path)
            expected = stored_factors(expected_factors(trained), found)
            return Outcome(
                found == expected, "export", f"{path} is a PEFT adapter of {pluralize(len(found), 'factor')}"
            )
        with without_progress_bar():
            model = transformers.AutoModelForCausalLM.from_pretrained(path, **loading_options(path))
        load_tokenizer(path, trained.trust_remote_code)
        same = ModelDimensions.from_checkpoint(path) == ModelDimensions.from_checkpoint(trained.path)
    except (OSError, ValueError, KeyError, SlimeLikeError) as error:
        return Outcome(False, "export", f"{path} cannot be loaded ({type(error).__name__}: {error})")
    return Outcome(same, "export", f"transformers loads {path}, {type(model).__name__}")


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
    quantizes = engine_limits(config.rollout.engine).quantization_problem(on_cuda=False) is None
    budget, reduction = max(512, length or prompt + new_tokens), algorithm.reduction.model_dump()
    if "length" in reduction:
        reduction["length"] = min(new_tokens, reduction["length"])
    # A critic without its own checkpoint, which warms up for at most the first of the steps.
    critic = {"path": None, "warmup_steps": min(1, config.critic.warmup_steps), "optimizer": {"offload": False}}
    if config.critic.parallel is not None:
        critic["parallel"] = _small_axes(config.critic.layout(config.trainer.parallel))
    more: dict[str, Any] = {
        "run_dir": str(run_dir),
        "steps": steps,
        "resume": "auto",
        "model": {"path": str(model), "weights": None, "dtype": "float32", "lora": {"path": None}},
        "rollout": _rollout(config.rollout, new_tokens, length, 8 if config.supervised else 4),
        "reward": {"workers": min(2, config.reward.workers)},
        "sync": {
            "transport": "auto" if config.sync.transport in ("nccl", "colocated") else config.sync.transport,
            "quantization": config.sync.quantization if quantizes else "none",
        },
        "evaluation": {
            "every": steps if config.evaluation.files else 0,
            "max_prompts": 4,
            "samples_per_prompt": 1,
            "max_new_tokens": None,
        },
        "algorithm": {
            "minibatches": min(2, algorithm.minibatches),
            "reduction": reduction,
            "overlong": {"buffer": _at_most(max(1, new_tokens // 2), algorithm.overlong.buffer)},
        },
        "trainer": _trainer(config.trainer, budget),
        "reference": _frozen(config.reference, algorithm.needs_reference, model),
        "distillation": _frozen(config.distillation, config.distillation.is_set, model)
        | {"teachers": dict.fromkeys(config.distillation.teachers, str(model))},
        "critic": critic,
        "checkpoint": {"every": 1, "keep": 2, "export_hf": True},
        "logging": {"wandb": False, "prometheus_port": None, "progress": "plain"},
        "health": {"webhook": None, "stop_on": ()},
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


def _trainer(trainer: TrainerConfig, budget: int) -> dict[str, Any]:
    return {
        "parallel": _small_axes(trainer.parallel),
        "attention": "auto" if trainer.attention == "transformer_engine" else trainer.attention,
        "attention_kernels": "auto",
        "fp8": "none",
        "fp8_bf16_layers": 0,
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
