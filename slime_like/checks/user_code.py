"""What can be wrong with the reward functions and environments that a configuration names, and with their options."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from slime_like.config.rollout import ENVIRONMENT, RewardFunction
from slime_like.config.run import RunConfig
from slime_like.interfaces.reward import group_reward
from slime_like.plugins.source import own_problem, written_function
from slime_like.sandbox.environments.observations import PLACE
from slime_like.sandbox.environments.registry import REGISTERED as ENVIRONMENTS
from slime_like.sandbox.environments.registry import build_environment
from slime_like.sandbox.rewards.registry import (
    REGISTERED,
    check_parameters,
    check_signature_options,
    resolve_reward,
    try_options,
)

_NO_RESULTS = frozenset({"None", "bool", "int", "float", "complex", "str", "bytes", "dict", "set"})
_LISTS = frozenset({"list", "tuple", "List", "Tuple", "Sequence"})


def reward_problems(config: RunConfig) -> Iterator[str]:
    """Registered functions are found and their options tried; a user's own module is looked up, its source is read, and
    it is imported by the workers only."""
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
                yield f"{field} is unknown; use {', '.join((*REGISTERED, ENVIRONMENT))} or `package.module:name`"
            elif problem := own_problem(function.name):
                yield f"{field} {problem}"
            else:
                yield from _written_problems(index, function)
        else:
            try:
                try_options(function.name, resolve_reward(function.name), function.options)
            except ValueError as error:
                yield f"reward.functions.{index}.options={dict(function.options)} do not fit: {error}"


def _written_problems(index: int, function: RewardFunction) -> Iterator[str]:
    """What the source of a user's own function tells. One that is decorated by others, or made otherwise, is judged by
    the workers, which have the object itself."""
    written = written_function(function.name)
    if written is None or set(written.decorators) - {group_reward.__name__}:
        return
    of_groups = group_reward.__name__ in written.decorators
    field = f"reward.functions.{index}.name={function.name} ({written.place})"
    if written.is_async:
        yield f"{field} is an `async def`, which is not waited for; write it as a plain `def`"
        return
    try:
        check_parameters(function.name, written.signature, of_groups)
    except ValueError as error:
        yield f"{field} does not fit: {error}"
        return
    try:
        check_signature_options(function.name, written.signature, function.options)
    except ValueError as error:
        yield f"reward.functions.{index}.options={dict(function.options)} do not fit: {error} ({written.place})"
    if written.returns is not None and not _may_be_result(written.returns, of_groups):
        wanted = "a list of RewardResults, one for each response" if of_groups else "a RewardResult"
        yield f"{field} says that it returns {ast.unparse(written.returns)}; return {wanted}"


def _may_be_result(annotation: ast.expr, of_groups: bool) -> bool:
    """False where an annotation says for certain that it is none, or no list of them."""
    if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
        return annotation.value not in _NO_RESULTS  # quoted, as types often are
    if isinstance(annotation, ast.Subscript):
        outer = ast.unparse(annotation.value).rpartition(".")[2]
        if of_groups and outer in _LISTS:
            return ast.unparse(annotation.slice) not in _NO_RESULTS
        return outer not in _NO_RESULTS | _LISTS
    return ast.unparse(annotation) not in (_NO_RESULTS if of_groups else _NO_RESULTS | _LISTS)


def environment_problems(config: RunConfig) -> Iterator[str]:
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
    elif problem := own_problem(environment.name):
        yield f"{prefix}.name={environment.name} {problem}"
    if environment.template is not None and environment.template.count(PLACE) != 1:
        yield f"{prefix}.template={environment.template!r} must hold {PLACE} once; put it where the observation belongs"
    limit, most = environment.max_turn_tokens, config.rollout.max_new_tokens
    if limit is not None and limit > most:
        yield f"{prefix}.max_turn_tokens={limit} is more than rollout.max_new_tokens={most}, a whole response; lower it"
