"""Names of what is looked up when the run starts: built-in parts, and the user's code with its options."""

import inspect
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from slime_like.checks.engine_install import interpreter_problems, is_installed
from slime_like.checks.rows import answered_samples, first_task
from slime_like.config.algorithm import ADVANTAGES, CORRECTIONS, KL_ESTIMATORS, LOSSES
from slime_like.config.rollout import AGENT, ENVIRONMENT, EnvironmentConfig
from slime_like.config.run import RunConfig
from slime_like.plugins.entry_points import BACKEND_GROUP, ENGINE_GROUP, installed_names
from slime_like.plugins.import_path import CUSTOM, absence_problem, import_path_problem, source_problem
from slime_like.sandbox.environments.observations import PLACE
from slime_like.sandbox.environments.pool import start_problems as start_problems_of_environment
from slime_like.sandbox.environments.registry import REGISTERED as ENVIRONMENTS
from slime_like.sandbox.environments.registry import build_environment
from slime_like.sandbox.rewards.pool import start_problems
from slime_like.sandbox.rewards.registry import OF_ROWS, REGISTERED, SERVICES, resolve_reward, try_options
from slime_like.system.credentials import shown_url


def backend_name_problems(config: RunConfig) -> Iterator[str]:
    return _unknown("trainer.backend", config.trainer.backend, installed_names(BACKEND_GROUP))


def backend_argument_problems(config: RunConfig) -> Iterator[str]:
    """Settings of a custom backend, given to a built-in one."""
    backend = config.trainer.backend
    if backend in ("megatron", "fsdp") and config.trainer.backend_args:
        yield f"trainer.backend_args are a custom backend's, trainer.backend={backend} reads none; remove them"


def engine_name_problems(config: RunConfig) -> Iterator[str]:
    """Engines of this environment; those of another are ``interpreter_name_problems``'s."""
    if config.rollout.python is None:
        yield from _unknown("rollout.engine", config.rollout.engine, installed_names(ENGINE_GROUP))


def interpreter_name_problems(config: RunConfig) -> list[str]:
    path = config.rollout.python
    return [] if path is None else interpreter_problems(path, config.rollout.engine)


def engine_installation_problems(config: RunConfig) -> Iterator[str]:
    """This environment has a known engine's package."""
    engine = config.rollout.engine
    if config.rollout.python is None and not is_installed(engine):
        yield (
            f"rollout.engine={engine} is not installed here; install this distribution with the extra [{engine}], or "
            "set rollout.python to a Python that has it"
        )


def loss_name_problems(config: RunConfig) -> Iterator[str]:
    return _unknown_or_not_importable("algorithm.loss", config.algorithm.loss, [*LOSSES])


def advantage_name_problems(config: RunConfig) -> Iterator[str]:
    return _unknown_or_not_importable("algorithm.advantage", config.algorithm.advantage, [*ADVANTAGES])


def kl_name_problems(config: RunConfig) -> Iterator[str]:
    return _unknown_or_not_importable("algorithm.kl_estimator", config.algorithm.kl_estimator, KL_ESTIMATORS)


def correction_name_problems(config: RunConfig) -> Iterator[str]:
    name = config.algorithm.importance_correction
    return _unknown_or_not_importable("algorithm.importance_correction", name, CORRECTIONS)


def reward_problems(config: RunConfig) -> Iterator[str]:
    """Registered functions are found and their options tried; the source of a custom one is looked through."""
    if config.reward.functions and not any(function.weight for function in config.reward.functions):
        yield "reward.functions: every weight is 0, so that each reward is 0; give a function a weight"
    names = [function.name for function in config.reward.functions]
    labels = [function.label for function in config.reward.functions]
    if config.rollout.agent.is_set and "functions" not in config.reward.model_fields_set:
        yield (
            f"reward.functions is not set, so that {names[0]} would judge and the reward that rollout.agent returns "
            "would not count; set it, e.g. to [{name: agent}]"
        )
    for index, function in enumerate(config.reward.functions):
        field = f"reward.functions.{index}.name={function.name}"
        if names.index(function.name) != index:
            yield f"{field} is used twice; keep one"
        elif labels.index(function.label) != index:
            yield f"{field} is {function.label} in metrics, as another function is; rename one of them"
        elif function.is_given:
            if function.name == ENVIRONMENT and config.rollout.environment.name is None:
                yield f"{field} needs an environment that gives rewards; set rollout.environment.name"
            if function.name == AGENT and not config.rollout.agent.is_set:
                yield f"{field} needs an agent that gives rewards; set rollout.agent.name"
            if function.options:
                yield f"reward.functions.{index}.options={dict(function.options)}: {function.name} takes none"
        elif function.name not in REGISTERED:
            if not all(function.name.partition(":")):
                known = (*REGISTERED, ENVIRONMENT, AGENT)
                near = "".join(f"did you mean {name}? Else " for name in get_close_matches(function.name, known, n=1))
                yield f"{field} is unknown; {near}use {', '.join(known)} or {CUSTOM}"
            elif problem := source_problem(function.name):
                yield f"{field} {problem}"
        else:
            try:
                try_options(function.name, resolve_reward(function.name), function.options)
            except ValueError as error:
                yield f"reward.functions.{index}.options={_shown(function.options)} do not fit: {error}"
            else:
                yield from _too_patient(config, index)


def _shown(options: Mapping[str, Any]) -> dict[str, Any]:
    """What may be printed of them: headers, and a URL's user and query, may be credentials."""
    hidden: dict[str, Any] = {name: "..." for name in options if name == "headers"}
    if isinstance(url := options.get("url"), str):
        hidden["url"] = shown_url(url)
    return {**options, **hidden}


def _too_patient(config: RunConfig, index: int) -> Iterator[str]:
    """What is waited for longer than the worker may take: a service, or tests. Each slow one would end the worker."""
    function, bound = config.reward.functions[index], config.reward.timeout_s
    if function.name in {*SERVICES, "code"}:
        default = inspect.signature(resolve_reward(function.name)).parameters["timeout_s"].default
        seconds = function.options.get("timeout_s", default)
        if seconds >= bound:
            yield (
                f"reward.timeout_s={bound:g} ends a call of {function.name} before reward.functions.{index}'s option "
                f"timeout_s={seconds:g} does; set reward.timeout_s above it"
            )


def custom_code_problems(config: RunConfig) -> Iterator[str]:
    """Modules of custom rewards, environments and agents that are not on this machine."""
    environment, agent = config.rollout.environment.name, config.rollout.agent.name
    named = {f"reward.functions.{index}.name": one.name for index, one in enumerate(config.reward.functions)}
    named |= {"rollout.environment.name": environment} if environment is not None else {}
    named |= {"rollout.agent.name": agent} if agent is not None else {}
    for field, name in named.items():
        if problem := absence_problem(name):
            yield f"{field}={name} {problem}"


def custom_reward_problems(config: RunConfig) -> Iterator[str]:
    """Custom functions whose module is found are imported and called once, each by a reward worker with its limits; so
    are included ones that need answers of a certain form."""
    names = enumerate(function.name for function in config.reward.functions)
    found = [index for index, name in names if name in OF_ROWS or (":" in name and not import_path_problem(name))]
    sample = next(answered_samples(config), None) if found else None
    for index in found:
        yield from start_problems(config.reward, index, sample)


def environment_problems(config: RunConfig) -> Iterator[str]:
    """Built-in environments are made, the source of a custom one is looked through."""
    environment, prefix = config.rollout.environment, "rollout.environment"
    if environment.name is None:
        defaults = EnvironmentConfig()  # which a run's config.yaml writes out
        changed = sorted(key for key, value in environment if value != getattr(defaults, key))
        if changed:
            yield f"{prefix}.{changed[0]} is set, but {prefix}.name is none; name an environment, or leave it out"
        return
    if environment.name in ENVIRONMENTS:
        try:
            build_environment(environment.name, environment.options)
        except ValueError as error:
            yield f"{prefix}.options={dict(environment.options)} do not fit: {error}"
    elif ":" not in environment.name:
        yield f"{prefix}.name={environment.name} is unknown; use {', '.join(ENVIRONMENTS)} or {CUSTOM}"
    elif problem := source_problem(environment.name):
        yield f"{prefix}.name={environment.name} {problem}"
    if environment.template is not None and environment.template.count(PLACE) != 1:
        yield f"{prefix}.template={environment.template!r} must hold {PLACE} once; put it where the observation belongs"
    limit, most = environment.max_turn_tokens, config.rollout.max_new_tokens
    if limit is not None and limit > most:
        yield f"{prefix}.max_turn_tokens={limit} is more than rollout.max_new_tokens={most}, a whole response; lower it"


def custom_environment_problems(config: RunConfig) -> list[str]:
    """A custom environment whose module is found is made once, with its options, and reset for the first row, by a
    worker with its limits."""
    environment = config.rollout.environment
    if environment.name is None or ":" not in environment.name or import_path_problem(environment.name):
        return []
    return start_problems_of_environment(environment, first_task(config))


def _unknown_or_not_importable(field: str, name: str, known: Sequence[str]) -> Iterator[str]:
    if ":" not in name:
        yield from _unknown(field, name, known, f", or {CUSTOM}")
    elif problem := import_path_problem(name):
        yield f"{field}={name} {problem}"


def _unknown(field: str, name: str, known: Sequence[str], otherwise: str = "") -> Iterator[str]:
    if name not in known:
        use = f"{', '.join(known) or '(none is installed)'}{otherwise}"
        yield f"{field}={name} is unknown; use one of: {use}"
