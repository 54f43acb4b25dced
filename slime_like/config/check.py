"""What can be wrong with a configuration whose fields are each right: across fields, and against files on disk.

Needs neither torch nor Ray, so that every problem is found before anything starts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path

from slime_like.config.algorithm import ADVANTAGES, BATCH_ADVANTAGES, GROUP_ADVANTAGES, LOSSES
from slime_like.config.attention import attention_problems
from slime_like.config.checkpoint_backend import backend_problem
from slime_like.config.dimensions import ModelDimensions
from slime_like.config.directories import directory_problem
from slime_like.config.engine_arguments import engine_problems
from slime_like.config.engine_install import interpreter_problems
from slime_like.config.entry_points import BACKEND_GROUP, ENGINE_GROUP, installed_names
from slime_like.config.families import family_problems
from slime_like.config.fsdp import BACKEND as FSDP
from slime_like.config.fsdp import axis_problems, fsdp_problems
from slime_like.config.import_path import import_path_problem
from slime_like.config.latent import latent_problems
from slime_like.config.layout import engine_rank_problems, layout_problems
from slime_like.config.offload import offload_problems
from slime_like.config.run import RunConfig
from slime_like.config.schedule import schedule_problems
from slime_like.config.weight_files import weight_file_problems
from slime_like.data.dump_names import rollouts_name
from slime_like.data.rows import SUFFIXES
from slime_like.environments.observations import PLACE
from slime_like.environments.registry import REGISTERED as ENVIRONMENTS
from slime_like.environments.registry import build_environment
from slime_like.errors import ConfigError
from slime_like.rewards.registry import ENVIRONMENT, REGISTERED, known_names, resolve_reward, try_options


def check(config: RunConfig) -> list[str]:
    """Every problem, each one sentence with field, value and remedy; empty where the run may start."""
    dimensions, problems = _dimensions(config.model.path, "model.path")
    problems += [] if dimensions is None else list(check_reference(config, dimensions))
    return problems + check_machine(config, dimensions) + check_settings(config, dimensions)


def require_valid(config: RunConfig) -> None:
    """
    Raises:
        ConfigError: with every problem that ``check`` finds.
    """
    problems = check(config)
    if problems:
        raise ConfigError(problems)


def check_settings(config: RunConfig, dimensions: ModelDimensions | None) -> list[str]:
    """Problems that are the same on every machine. Reads no file.

    Args:
        dimensions: the model's; ``None`` where they are not known, and what depends on them is left out.
    """
    problems = [*_names(config), *fsdp_problems(config), *_steps(config), *_streaming(config)]
    if config.trainer.backend == "megatron":
        problems += offload_problems(config)
    if not config.supervised:
        problems += engine_problems(config.rollout.engine, config.rollout)
        problems += [*_devices(config), *_sync(config), *_sampling(config)]
        problems += _pipeline(config)
        problems += [*_evaluation(config), *_rewards(config), *_environment(config)]
    if dimensions is not None:
        problems += [*family_problems(config, dimensions), *layout_problems(config.trainer.parallel, dimensions)]
        problems += [] if config.supervised else engine_rank_problems(config.rollout, dimensions)
        problems += [*_experts(config, dimensions), *_lengths(config, dimensions)]
    return problems


def check_machine(config: RunConfig, dimensions: ModelDimensions | None) -> list[str]:
    """What this machine lacks: files, directories that can be written, packages."""
    problems = [*_places(config), *_resume(config), *_kept_rollouts(config), *_start_weights(config)]
    problems += attention_problems(config)
    if not config.supervised:
        problems += _sync_directory(config)
    if dimensions is not None:
        if config.model.weights is None or not config.supervised:  # engines load model.path in any case
            problems += _weights(config.model.path, "model.path", dimensions)
        problems += _reference_weights(config)
    return problems


def check_trainer(config: RunConfig, loads_model: bool = False) -> list[str]:
    """Problems of the trainer alone, for commands that start neither engines nor rewards and read no prompts.

    Args:
        loads_model: the weights come from ``model.path``, unless ``model.weights`` says otherwise.
    """
    dimensions, problems = _dimensions(config.model.path, "model.path")
    problems += _unknown("trainer.backend", config.trainer.backend, installed_names(BACKEND_GROUP))
    problems += _start_weights(config)
    problems += [*attention_problems(config), *fsdp_problems(config)]
    if dimensions is not None:
        problems += [*family_problems(config, dimensions), *layout_problems(config.trainer.parallel, dimensions)]
        problems += [] if config.supervised else engine_rank_problems(config.rollout, dimensions)
        problems += _experts(config, dimensions)
        if loads_model and config.model.weights is None:
            problems += _weights(config.model.path, "model.path", dimensions)
    return problems


def check_run_dir(config: RunConfig) -> list[str]:
    """Can it be made, and written into?"""
    problem = directory_problem(config.run_dir)
    return [] if problem is None else [f"run_dir={config.run_dir} {problem}"]


def _dimensions(path: Path, field: str) -> tuple[ModelDimensions | None, list[str]]:
    if not path.is_dir():
        return None, [f"{field}={path} is no directory; give a Hugging Face checkpoint directory"]
    try:
        return ModelDimensions.from_checkpoint(path), []
    except ConfigError as error:
        return None, [problem.replace("model.path=", f"{field}=", 1) for problem in error.problems]


def _weights(path: Path, field: str, dimensions: ModelDimensions) -> list[str]:
    return [f"{field}: {problem}" for problem in weight_file_problems(path, dimensions)]


def _start_weights(config: RunConfig) -> list[str]:
    weights = config.model.weights
    if weights is None:
        return []
    if (weights / "trainer").is_dir():
        problem = backend_problem(weights, config.trainer.backend, "model.weights")
        return [] if problem is None else [problem]
    return [
        f"model.weights={weights} is no checkpoint (no trainer/ in it); give what `slime-like convert to-megatron` "
        "wrote, or a run's checkpoints/step-N"
    ]


def _places(config: RunConfig) -> Iterator[str]:
    """Files and directories, and packages that a setting needs."""
    yield from check_run_dir(config)
    kept = config.debug.save_rollouts
    if kept is not None and (problem := directory_problem(kept)):
        yield f"debug.save_rollouts={kept} {problem}"
    if not config.data.train and not config.debug.load_rollouts:
        yield "data.train=[] is empty; give at least one .jsonl or .parquet file"
    for field, files in (("data.train", config.data.train), ("evaluation.files", config.evaluation.files)):
        for file in files:
            if file.suffix not in SUFFIXES:
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


def _sampling(config: RunConfig) -> Iterator[str]:
    """Training rollouts must be samples of the whole distribution, in groups that can be compared."""
    rollout, algorithm = config.rollout, config.algorithm
    if rollout.top_p != 1.0:
        yield (f"rollout.top_p={rollout.top_p:g} cuts the distribution that the loss assumes whole; use 1 for training")
    if rollout.top_k != -1:
        yield f"rollout.top_k={rollout.top_k} cuts the distribution that the loss assumes whole; use -1 for training"
    if rollout.samples_per_prompt == 1 and algorithm.advantage in GROUP_ADVANTAGES:
        yield (
            f"rollout.samples_per_prompt=1 gives algorithm.advantage={algorithm.advantage} nothing to compare, so that "
            "every advantage is 0; use at least 2, or advantage: reinforce_pp"
        )
    buffer = algorithm.overlong_buffer
    if buffer is not None and buffer > rollout.max_new_tokens:
        yield (
            f"algorithm.overlong_buffer={buffer} is more than rollout.max_new_tokens={rollout.max_new_tokens}, below "
            "which the penalty grows; use at most that"
        )


def _pipeline(config: RunConfig) -> Iterator[str]:
    """May sampling run ahead of training, and may groups be left out?"""
    rollout, algorithm, ahead = config.rollout, config.algorithm, config.rollout.max_staleness
    if ahead > 0 and config.cluster.placement == "colocated":
        yield (
            f"rollout.max_staleness={ahead} lets engines and trainers work at once, but cluster.placement=colocated "
            "has them take turns on the same devices; use placement: separate, or max_staleness: 0"
        )
    if ahead > 0 and "importance_correction" not in algorithm.model_fields_set and not config.supervised:
        yield (
            f"rollout.max_staleness={ahead} trains on samples of older weights, which biases the gradient unless "
            "algorithm.importance_correction corrects for it; set it to truncate or mask, or to none if that is meant"
        )
    if rollout.oversample > 1 and ahead > 0:
        yield (
            f"rollout.oversample={rollout.oversample:g} aborts what is late, but with rollout.max_staleness={ahead} it "
            "is trained later instead; use oversample: 1, or max_staleness: 0"
        )
    if rollout.drop_zero_spread and rollout.samples_per_prompt == 1:
        yield (
            "rollout.drop_zero_spread=True drops every group of rollout.samples_per_prompt=1; use at least 2 samples, "
            "or drop_zero_spread: false"
        )


def _streaming(config: RunConfig) -> Iterator[str]:
    """Can a step's gradient be added up before its last sample is known?"""
    if not config.rollout.stream:
        return
    algorithm, remedy = config.algorithm, "or rollout.stream: false"
    if config.cluster.placement == "colocated":
        yield (
            "rollout.stream=true has trainers work while engines do, but cluster.placement=colocated has them take "
            f"turns on the same devices; use placement: separate, {remedy}"
        )
    if algorithm.epochs * algorithm.minibatches > 1:
        yield (
            f"rollout.stream=true goes through a batch once, but algorithm.epochs={algorithm.epochs} and "
            f"algorithm.minibatches={algorithm.minibatches} make several updates of it, for which all of it must be "
            f"there; use 1 of both, {remedy}"
        )
    if algorithm.advantage in BATCH_ADVANTAGES:
        yield (
            f"rollout.stream=true needs advantages before the batch is complete, and algorithm.advantage="
            f"{algorithm.advantage} normalises over all of it; use one that compares within groups, {remedy}"
        )
    if algorithm.kl_reward_coef > 0:
        yield (
            f"rollout.stream=true needs advantages before anything is scored, but algorithm.kl_reward_coef="
            f"{algorithm.kl_reward_coef:g} takes the KL off rewards afterwards; use kl_coef instead, {remedy}"
        )
    if algorithm.moe_aux_loss_coef > 0:
        yield (
            f"algorithm.moe_aux_loss_coef={algorithm.moe_aux_loss_coef:g} adds a loss with a denominator of its own, "
            "and with rollout.stream=true neither is known while gradients are added up; set it to 0, " + remedy
        )
    if config.debug.shuffle_advantages:
        yield (
            "debug.shuffle_advantages=true permutes the advantages of a whole batch, which rollout.stream=true does "
            f"not wait for; set it to false, {remedy}"
        )


def _evaluation(config: RunConfig) -> Iterator[str]:
    evaluation = config.evaluation
    if evaluation.every > 0 and not evaluation.files:
        yield f"evaluation.every={evaluation.every}, but evaluation.files is empty; give held-out files, or every: 0"
    if evaluation.temperature == 0 and evaluation.samples_per_prompt > 1:
        yield (
            f"evaluation.samples_per_prompt={evaluation.samples_per_prompt} at evaluation.temperature=0 samples the "
            "same response again and again; use 1, or a temperature above 0"
        )


def _rewards(config: RunConfig) -> Iterator[str]:
    """Registered functions are found and their options tried; a user's own module is looked up, and imported by the
    workers only."""
    names = [function.name for function in config.reward.functions]
    for index, function in enumerate(config.reward.functions):
        field = f"reward.functions.{index}.name={function.name}"
        if names.index(function.name) != index:
            yield f"{field} is used twice; keep one"
        elif function.name == ENVIRONMENT:
            if config.rollout.environment.name is None:
                yield f"{field} needs an environment that gives rewards; set rollout.environment.name"
            if function.options:
                yield f"reward.functions.{index}.options={dict(function.options)}: {ENVIRONMENT} takes none"
        elif function.name not in REGISTERED:
            if not all(function.name.partition(":")):
                yield f"{field} is unknown; use {known_names()} or `package.module:name`"
            elif problem := import_path_problem(function.name):
                yield f"{field} {problem}"
        elif function.name in REGISTERED:
            try:
                try_options(function.name, resolve_reward(function.name), function.options)
            except ValueError as error:
                yield f"reward.functions.{index}.options={dict(function.options)} do not fit: {error}"


def _environment(config: RunConfig) -> Iterator[str]:
    """As with rewards: what comes with the package is tried, a user's own is looked up."""
    environment, prefix = config.rollout.environment, "rollout.environment"
    if environment.name is None:
        unused = sorted(environment.model_fields_set - {"name"})
        if any(getattr(environment, key) != type(environment).model_fields[key].get_default() for key in unused):
            yield f"{prefix}.{unused[0]} is set, but {prefix}.name is none; name an environment, or leave it out"
        return
    if environment.name in ENVIRONMENTS:
        try:
            build_environment(environment.name, environment.options)
        except ValueError as error:
            yield f"{prefix}.options={dict(environment.options)} do not fit: {error}"
    elif ":" not in environment.name:
        yield f"{prefix}.name={environment.name} is unknown; use {', '.join(ENVIRONMENTS)} or `package.module:name`"
    elif problem := import_path_problem(environment.name):
        yield f"{prefix}.name={environment.name} {problem}"
    if environment.template is not None and environment.template.count(PLACE) != 1:
        yield f"{prefix}.template={environment.template!r} must hold {PLACE} once; put it where the observation belongs"
    limit, most = environment.max_turn_tokens, config.rollout.max_new_tokens
    if limit is not None and limit > most:
        yield f"{prefix}.max_turn_tokens={limit} is more than rollout.max_new_tokens={most}, a whole response; lower it"


def _experts(config: RunConfig, dimensions: ModelDimensions) -> Iterator[str]:
    yield from latent_problems(config.trainer, dimensions)
    coefficient = config.algorithm.moe_aux_loss_coef
    if coefficient > 0 and dimensions.num_experts == 0:
        yield f"algorithm.moe_aux_loss_coef={coefficient:g}, but the model has no experts to balance; set it to 0"


def _lengths(config: RunConfig, dimensions: ModelDimensions) -> Iterator[str]:
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
        if section == "rollout":
            limits.append(("trainer.target_tokens_per_batch", budget))
        for what, limit in limits:
            if longest > limit:
                yield f"{terms}, more than {what}={limit}; lower them" + ("" if "model's" in what else ", or raise it")
    if rollout.max_model_len is not None and rollout.max_model_len > dimensions.max_position_embeddings:
        yield (
            f"rollout.max_model_len={rollout.max_model_len} is more than the model's "
            f"max_position_embeddings={dimensions.max_position_embeddings}; use at most that"
        )


def _reference_weights(config: RunConfig) -> list[str]:
    path = config.reference.path
    if path is None or not config.algorithm.needs_reference:
        return []
    reference, _ = _dimensions(path, "reference.path")
    return [] if reference is None else _weights(path, "reference.path", reference)


def check_reference(config: RunConfig, policy: ModelDimensions) -> Iterator[str]:
    """Problems with the reference that its ``config.json`` alone tells."""
    path = config.reference.path
    if not config.algorithm.needs_reference:
        return
    reference: ModelDimensions | None = policy
    if path is not None:
        reference, problems = _dimensions(path, "reference.path")
        yield from problems
    if reference is None:
        return
    if reference.vocab_size != policy.vocab_size:
        yield (
            f"reference.path={path} has {reference.vocab_size} tokens and model.path {policy.vocab_size}, so their "
            "logprobs cannot be compared; use a reference with the policy's tokenizer"
        )
    if config.reference.update_interval and reference != policy:
        yield (
            f"reference.update_interval={config.reference.update_interval} gives the reference the policy's weights, "
            f"and reference.path={path} has other sizes than model.path={config.model.path}; use 0, or a reference of "
            "the policy's sizes"
        )
    if config.reference.placement == "workers":
        yield from _reference_workers(config, reference)


def _reference_workers(config: RunConfig, dimensions: ModelDimensions) -> Iterator[str]:
    problems = layout_problems(config.reference.parallel, dimensions)
    yield from (problem.replace("trainer.parallel", "reference.parallel") for problem in problems)
    if config.trainer.backend == FSDP:
        yield from axis_problems(config.reference.parallel, "reference.parallel")
    if config.debug.load_rollouts is not None:
        yield (
            f"reference.placement=workers scores groups as they are sampled, and debug.load_rollouts="
            f"{config.debug.load_rollouts} samples none; use placement: trainer"
        )
