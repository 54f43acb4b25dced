"""What can be wrong with a configuration whose fields are each right: across fields, and against files on disk.

Needs neither torch nor Ray, so that every problem is found before anything starts.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path

from slime_like.checks.attention import attention_problems
from slime_like.checks.checkpoint_backend import backend_problem
from slime_like.checks.directories import directory_problem, shared_directory_problem
from slime_like.checks.engine_arguments import engine_problems
from slime_like.checks.engine_install import interpreter_problems
from slime_like.checks.families import family_problems
from slime_like.checks.files import data_problems
from slime_like.checks.fsdp import fsdp_problems
from slime_like.checks.latent import latent_problems
from slime_like.checks.layout import engine_rank_problems, layout_problems
from slime_like.checks.model_directories import (
    find_dimensions,
    reference_problems,
    reference_weight_problems,
    weight_problems,
)
from slime_like.checks.offload import offload_problems
from slime_like.checks.sampling import sampling_problems, streaming_problems
from slime_like.checks.schedule import schedule_problems
from slime_like.checks.user_code import custom_reward_problems, environment_problems, reward_problems
from slime_like.config.algorithm import ADVANTAGES, LOSSES
from slime_like.config.rollout import MIN_TEMPERATURE
from slime_like.config.run import RunConfig
from slime_like.cpu.choice import kernels_are_used
from slime_like.data.dump_names import rollouts_name
from slime_like.data.rows import SUFFIXES
from slime_like.errors import ConfigError
from slime_like.models.converted import DESCRIPTION, MODEL, WEIGHTS, converted_problem, is_converted
from slime_like.models.dimensions import ModelDimensions
from slime_like.plugins.entry_points import BACKEND_GROUP, ENGINE_GROUP, installed_names
from slime_like.plugins.import_path import import_path_problem


def check(config: RunConfig, trains: bool = True) -> list[str]:
    """Every problem, each one sentence with field, value and remedy; empty where the run may start.

    Args:
        trains: trainers are started, which must be able to compute the model and are given data. Where they are not,
            ``config`` is what ``for_evaluation`` made of it.
    """
    dimensions, problems = find_dimensions(config.model.path, "model.path")
    problems += [] if dimensions is None else list(reference_problems(config, dimensions))
    problems += check_machine(config, dimensions, trains) + check_settings(config, dimensions, trains)
    return [*problems, *custom_reward_problems(config)]


def require_valid(config: RunConfig) -> None:
    """
    Raises:
        ConfigError: with every problem that ``check`` finds, and with what is wrong with the data where it finds any.
    """
    problems = check(config)
    if problems:
        raise ConfigError(problems + data_problems(config, trains=True))


def check_settings(config: RunConfig, dimensions: ModelDimensions | None, trains: bool = True) -> list[str]:
    """Problems that are the same on every machine. Reads no file.

    Args:
        dimensions: the model's; ``None`` where they are not known, and what depends on them is left out.
        trains: as in ``check``.
    """
    problems = [*_names(config), *fsdp_problems(config), *_steps(config), *streaming_problems(config)]
    if config.trainer.backend == "megatron":
        problems += offload_problems(config)
    if not config.supervised:
        problems += engine_problems(config.rollout.engine, config.rollout)
        problems += [*_devices(config), *_sync(config), *sampling_problems(config)]
        problems += [*_evaluation(config), *reward_problems(config), *environment_problems(config)]
    if dimensions is not None:
        problems += _trained_model(config, dimensions) if trains else []
        problems += [] if config.supervised else engine_rank_problems(config.rollout, dimensions)
        problems += _lengths(config, dimensions, trains)
    return problems


def check_machine(config: RunConfig, dimensions: ModelDimensions | None, trains: bool = True) -> list[str]:
    """What this machine lacks: files, directories that can be written, packages. ``trains`` as in ``check``."""
    problems = [*_places(config, trains), *_resume(config), *_kept_rollouts(config), *_start_weights(config)]
    problems += _converted(config)
    problems += [*attention_problems(config), *check_compiler(config)]
    if not config.supervised:
        problems += _sync_directory(config)
    if dimensions is not None:
        if config.model.weights is None or not config.supervised:  # engines load model.path in any case
            problems += weight_problems(config.model.path, "model.path", dimensions)
        problems += reference_weight_problems(config)
    return problems


def check_trainer(config: RunConfig, loads_model: bool = False) -> list[str]:
    """Problems of the trainer alone, for commands that start neither engines nor rewards and read no prompts.

    Args:
        loads_model: the weights come from ``model.path``, unless ``model.weights`` says otherwise.
    """
    dimensions, problems = find_dimensions(config.model.path, "model.path")
    problems += _unknown("trainer.backend", config.trainer.backend, installed_names(BACKEND_GROUP))
    problems += [*_start_weights(config), *_converted(config)]
    problems += [*attention_problems(config), *fsdp_problems(config)]
    if dimensions is not None:
        problems += _trained_model(config, dimensions)
        problems += [] if config.supervised else engine_rank_problems(config.rollout, dimensions)
        if loads_model and config.model.weights is None:
            problems += weight_problems(config.model.path, "model.path", dimensions)
    return problems


def check_run_dir(config: RunConfig) -> list[str]:
    """Can it be made, and written into, and moved aside by a later run?"""
    problem = shared_directory_problem(config.run_dir) or directory_problem(config.run_dir)
    return [] if problem is None else [f"run_dir={config.run_dir} {problem}"]


def check_compiler(config: RunConfig) -> list[str]:
    """May Numba compile? It has a variable of its own against it, for debugging."""
    value = os.environ.get("NUMBA_DISABLE_JIT", "")
    if not value.strip("0") or not kernels_are_used(config.trainer.cpu_kernels):
        return []
    return [
        f"NUMBA_DISABLE_JIT={value} in the environment keeps Numba from compiling the kernels for a CPU, which do not "
        "run uncompiled; unset it, or use trainer.cpu_kernels=off"
    ]


def _start_weights(config: RunConfig) -> list[str]:
    weights = config.model.weights
    if weights is None:
        return []
    if (weights / WEIGHTS).is_dir():
        problem = backend_problem(weights, config.trainer.backend, "model.weights")
        return [] if problem is None else [problem]
    return [
        f"model.weights={weights} is no checkpoint (no trainer/ in it); give what `slime-like convert to-megatron` "
        "wrote, or a run's checkpoints/step-N"
    ]


def _converted(config: RunConfig) -> Iterator[str]:
    """Damage to the small files of what `slime-like convert to-megatron` wrote, whether its weights are used or not."""
    path, weights = config.model.path, config.model.weights
    named: dict[Path, str] = {}
    if weights is not None and is_converted(weights):
        named[weights.resolve()] = f"model.weights={weights}"
    if path.name == MODEL and (path.resolve().parent / DESCRIPTION).is_file():
        named.setdefault(path.resolve().parent, f"model.path={path} belongs to a checkpoint that")
    for checkpoint, name in named.items():
        problem = converted_problem(checkpoint)
        if problem is not None:
            yield f"{name} {problem}"


def _places(config: RunConfig, trains: bool) -> Iterator[str]:
    """Files and directories, and packages that a setting needs."""
    yield from check_run_dir(config)
    kept = config.debug.save_rollouts
    if kept is not None and (problem := directory_problem(kept)):
        yield f"debug.save_rollouts={kept} {problem}"
    if trains and not config.data.train and not config.debug.load_rollouts:
        yield "data.train=[] is empty; give at least one .jsonl or .parquet file"
    for field, files in (("data.train", config.data.train), ("evaluation.files", config.evaluation.files)):
        for file in files:
            if file.is_dir():
                yield f"{field}={file} is a directory; give {' or '.join(SUFFIXES)} files"
            elif file.suffix not in SUFFIXES:
                yield f"{field}={file} is of an unknown type; give {' or '.join(SUFFIXES)} files"
            elif not file.is_file():
                yield f"{field}={file} does not exist; give an existing file"
    wanted = (("wandb", config.logging.wandb), ("tensorboard", config.logging.tensorboard))
    for package, asked in wanted:
        if asked and find_spec(package) is None:
            yield f"logging.{package}=true, but the package is not installed; pip install {package}, or set it to false"


def _resume(config: RunConfig) -> list[str]:
    if config.resume in ("auto", "never") or Path(config.resume).is_dir():
        return []  # what is in a directory is read, and compared, when the run starts
    return [
        f"resume={config.resume} is neither auto nor never, nor a directory; give the path of a checkpoint, such as "
        f"{config.run_dir / 'checkpoints' / 'latest'}"
    ]


def _kept_rollouts(config: RunConfig) -> Iterator[str]:
    """Rollouts of an earlier run must cover this one's steps; without an engine nothing can be evaluated."""
    directory = config.debug.load_rollouts
    if directory is None:
        return
    if config.evaluation.files:
        yield (
            f"debug.load_rollouts={directory} starts no engine, so that evaluation.files cannot be sampled from; set "
            "evaluation.files: none and evaluation.every: 0 (and use slime-like eval on the exported model)"
        )
    if config.debug.shuffle_advantages:
        yield (
            "debug.shuffle_advantages=true permutes advantages as they are computed, and debug.load_rollouts="
            f"{directory} brings those that were kept; sample anew, or set it to false"
        )
    if not directory.is_dir():
        yield f"debug.load_rollouts={directory} is no directory; give one that debug.save_rollouts filled"
        return
    present = {file.name for file in directory.iterdir()}
    missing = [step for step in _trained_steps(config) if rollouts_name(step) not in present]
    if missing:
        yield (
            f"debug.load_rollouts={directory} lacks {rollouts_name(missing[0])}, and every one of steps={config.steps} "
            f"needs its own; train for fewer steps, or keep more with debug.save_rollouts"
        )


def _trained_steps(config: RunConfig) -> Iterable[int]:
    """The steps that certainly will be trained: where a checkpoint is gone on from, only the last is certain."""
    fresh = not any((config.run_dir / "checkpoints").glob("step-*"))
    starts_anew = config.resume == "never" or (config.resume == "auto" and fresh)
    return range(1 if starts_anew else config.steps, config.steps + 1)


def _names(config: RunConfig) -> Iterator[str]:
    """Names of things that are looked up when the run starts."""
    named = [("trainer.backend", config.trainer.backend, installed_names(BACKEND_GROUP), "")]
    importable = ", or `package.module:name`"
    named.append(("algorithm.loss", config.algorithm.loss, list(LOSSES), importable))
    if not config.supervised:
        named.append(("algorithm.advantage", config.algorithm.advantage, list(ADVANTAGES), importable))
        if config.rollout.python is None:
            named.append(("rollout.engine", config.rollout.engine, installed_names(ENGINE_GROUP), ""))
        else:
            yield from interpreter_problems(config.rollout.python, config.rollout.engine)
    for field, name, known, otherwise in named:
        if otherwise and ":" in name:
            problem = import_path_problem(name)
            if problem:
                yield f"{field}={name} {problem}"
        else:
            yield from _unknown(field, name, known, otherwise)


def _unknown(field: str, name: str, known: Sequence[str], otherwise: str = "") -> list[str]:
    if name in known:
        return []
    return [f"{field}={name} is unknown; use one of: {', '.join(known) or '(none is installed)'}{otherwise}"]


def _steps(config: RunConfig) -> Iterator[str]:
    """Do a step's samples suffice for its minibatches and replicas, and does the schedule make sense?"""
    prompts, minibatches = config.rollout.prompts_per_step, config.algorithm.minibatches
    samples = 1 if config.supervised else config.rollout.samples_per_prompt
    replicas = config.trainer.parallel.data
    if minibatches > prompts:
        yield (
            f"algorithm.minibatches={minibatches} is more than rollout.prompts_per_step={prompts}, and a group stays "
            f"in one minibatch; use at most {prompts}"
        )
    elif prompts // minibatches * samples < replicas:
        yield (
            f"trainer.parallel.data={replicas} is more than the {prompts // minibatches * samples} samples of a "
            "minibatch, and every replica needs one; lower it, or raise rollout.prompts_per_step"
        )
    yield from schedule_problems(config)


def _devices(config: RunConfig) -> Iterator[str]:
    """Do colocated engines find enough trainer ranks to share with?"""
    engines, tensor = config.rollout.num_engines, config.rollout.tensor
    ranks = config.trainer.parallel.world_size
    if config.cluster.placement == "colocated" and engines * tensor > ranks:
        yield (
            f"cluster.placement=colocated: rollout.num_engines={engines} times rollout.tensor={tensor} is more than "
            f"the {ranks} trainer ranks; use at most {ranks} in all, or placement: separate"
        )


def _sync(config: RunConfig) -> Iterator[str]:
    """What is known of the weights' way before devices are; the rest is checked when it is opened."""
    sync, colocated = config.sync, config.cluster.placement == "colocated"
    if sync.transport == "directory":
        if sync.directory is None:
            yield (
                "sync.transport=directory needs sync.directory, one that trainers and engines both see; give one, or "
                "use transport: auto"
            )
    elif sync.directory is not None:
        yield f"sync.directory={sync.directory} is used by sync.transport=directory only, and not by {sync.transport}"
    if sync.transport == "nccl" and colocated:
        yield (
            "sync.transport=nccl needs a device of its own for every process, but with cluster.placement=colocated "
            "engines share the trainers'; use auto"
        )
    if sync.transport == "cuda_ipc" and not colocated:
        yield "sync.transport=cuda_ipc needs engines on the trainers' devices, cluster.placement=colocated; or use auto"


def _sync_directory(config: RunConfig) -> Iterator[str]:
    directory = config.sync.directory if config.sync.transport == "directory" else None
    problem = directory_problem(directory) if directory is not None else None
    if problem:
        yield f"sync.directory={directory} {problem}"


def _evaluation(config: RunConfig) -> Iterator[str]:
    evaluation = config.evaluation
    if evaluation.every > 0 and not evaluation.files:
        yield f"evaluation.every={evaluation.every}, but evaluation.files is empty; give held-out files, or every: 0"
    if 0 < evaluation.temperature < MIN_TEMPERATURE:
        yield (
            f"evaluation.temperature={evaluation.temperature} is lower than engines sample at; use 0 (greedy), or at "
            f"least {MIN_TEMPERATURE}"
        )
    if evaluation.temperature == 0 and evaluation.samples_per_prompt > 1:
        yield (
            f"evaluation.samples_per_prompt={evaluation.samples_per_prompt} at evaluation.temperature=0 samples the "
            "same response again and again; use 1, or a temperature above 0"
        )


def _trained_model(config: RunConfig, dimensions: ModelDimensions) -> Iterator[str]:
    """Why the trainer cannot compute this model."""
    yield from family_problems(config, dimensions)
    yield from layout_problems(config.trainer.parallel, dimensions)
    yield from _experts(config, dimensions)


def _experts(config: RunConfig, dimensions: ModelDimensions) -> Iterator[str]:
    yield from latent_problems(config.trainer, dimensions)
    coefficient = config.algorithm.moe_aux_loss_coef
    if coefficient > 0 and dimensions.num_experts == 0:
        yield f"algorithm.moe_aux_loss_coef={coefficient:g}, but the model has no experts to balance; set it to 0"


def _lengths(config: RunConfig, dimensions: ModelDimensions, trains: bool) -> Iterator[str]:
    """Every sequence must fit the model, the engine and a micro-batch; token ids must exist."""
    rollout, prompt = config.rollout, config.data.max_prompt_tokens
    for token in rollout.stop_token_ids:
        if not 0 <= token < dimensions.vocab_size:
            yield (
                f"rollout.stop_token_ids={token} is no token of the model; its ids are 0 to {dimensions.vocab_size - 1}"
            )
    if config.supervised:
        return
    budget = config.trainer.target_tokens_per_batch
    held_out = config.evaluation.max_new_tokens if config.evaluation.files else None
    responses = [("rollout", rollout.max_new_tokens), ("evaluation", held_out)]
    for section, response in responses:
        if response is None:
            continue
        longest = prompt + response
        terms = f"data.max_prompt_tokens={prompt} and {section}.max_new_tokens={response} make {longest} tokens"
        limits = [("the model's max_position_embeddings", dimensions.max_position_embeddings)]
        limits.append(("rollout.max_model_len", config.max_model_len))
        if section == "rollout" and trains:
            limits.append(("trainer.target_tokens_per_batch", budget))
        for what, limit in limits:
            if longest > limit:
                yield f"{terms}, more than {what}={limit}; lower them" + ("" if "model's" in what else ", or raise it")
    if rollout.max_model_len is not None and rollout.max_model_len > dimensions.max_position_embeddings:
        yield (
            f"rollout.max_model_len={rollout.max_model_len} is more than the model's "
            f"max_position_embeddings={dimensions.max_position_embeddings}; use at most that"
        )
