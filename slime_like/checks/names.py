"""Checks of what a configuration names: data files, built-in parts, and custom code with its options.

The run reads and checks all rows before Ray starts. A row is read here only to try custom code.
"""

import inspect
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from slime_like.config.algorithm import AlgorithmConfig
from slime_like.config.base import Part
from slime_like.config.reading.parts import read_part
from slime_like.config.rollout import AGENT, ENVIRONMENT, NODE, RewardConfig
from slime_like.config.run import RunConfig
from slime_like.data.encoding import answer_text
from slime_like.data.messages import read_messages, spells_messages
from slime_like.data.rows import SUFFIXES, data_files, in_format, read_rows
from slime_like.errors import DataError
from slime_like.interfaces.user_code import Task
from slime_like.plugins.objective import ADVANTAGES, CORRECTIONS, KL_ESTIMATORS, LOSSES, REDUCTIONS
from slime_like.plugins.resolve import (
    BACKEND_GROUP,
    CUSTOM,
    import_path_problem,
    installed_names,
    resolve_callable,
    unknown,
)
from slime_like.sandbox.agent_worker import PLACES
from slime_like.sandbox.environment_worker import REGISTERED as ENVIRONMENTS
from slime_like.sandbox.environment_worker import build_environment
from slime_like.sandbox.observations import PLACE
from slime_like.sandbox.rewards.pool import RewardItem, start_problems
from slime_like.sandbox.rewards.registry import OF_ROWS, REGISTERED, SERVICES, resolve_reward, try_options
from slime_like.sandbox.single_items import AgentPool, environment_start_problems
from slime_like.system.network import interface_of, is_loopback, redact_url
from slime_like.system.words import from_here


def training_file_problems(config: RunConfig) -> Iterator[str]:
    data = config.data
    if not data.training_files and not config.debug.load_rollouts:
        yield "data.train=[] is empty; give at least one .jsonl or .parquet file, or sources in data.mixture"
    yield from file_problems("data.train", data.train)
    for number, source in enumerate(data.mixture):
        yield from file_problems(f"data.mixture.{number}.files", source.files)


def held_out_file_problems(config: RunConfig) -> Iterator[str]:
    return file_problems("evaluation.files", config.evaluation.files)


def file_problems(field: str, paths: Sequence[Path]) -> Iterator[str]:
    for path in paths:
        try:
            files = data_files(path)
        except DataError as error:
            yield f"{field}={error}"
            continue
        for file in files:
            if not file.is_file():
                yield f"{field}={file} does not exist{from_here(file)}; give an existing file, directory or pattern"
            elif file.suffix not in SUFFIXES:
                how = "`datasets.load_dataset(...)[split].to_json('train.jsonl')` writes one"
                yield f"{field}={file} has an unknown type; give {' or '.join(SUFFIXES)} files ({how})"


def first_row(config: RunConfig) -> tuple[Task, str] | None:
    """Return the first row with an answer, with messages joined to a text, and as JSON; ``None`` without any."""
    for data in config.data.parts:
        for file in data.train or config.evaluation.files:
            with suppress(DataError, TypeError, ValueError):
                for whole in read_rows(file):
                    row = in_format(whole, data)
                    prompt, answer = row.get(data.prompt_key) or "", row.get(data.answer_key)
                    settings = None if data.environment_key is None else row.get(data.environment_key)
                    if not isinstance(prompt, str) or spells_messages(prompt):
                        messages = read_messages(row, data.prompt_key, "bad-prompt")
                        prompt = "\n".join(message["content"] for message in messages)
                    if answer is not None:
                        task = Task(prompt, answer_text(answer), settings if isinstance(settings, dict) else {})
                        return task, json.dumps(whole.values, default=str)
    return None


_PREFIX = "rollout.agent"
_PLACE = re.compile(r"\{([a-z_]+)\}")


def backend_name_problems(config: RunConfig) -> Iterator[str]:
    return unknown("trainer.backend", config.trainer.backend, installed_names(BACKEND_GROUP))


def algorithm_name_problems(algorithm: AlgorithmConfig) -> Iterator[str]:
    """Check the parts of the loss, with their options."""
    yield from _part_problems("algorithm.loss", algorithm.loss, LOSSES)
    yield from _part_problems("algorithm.reduction", algorithm.reduction, REDUCTIONS)
    yield from _unknown_or_not_importable("algorithm.kl.estimator", algorithm.kl.estimator, KL_ESTIMATORS)
    correction = algorithm.importance.correction
    yield from _unknown_or_not_importable("algorithm.importance.correction", correction, CORRECTIONS)


def advantage_name_problems(algorithm: AlgorithmConfig) -> Iterator[str]:
    return _part_problems("algorithm.advantage", algorithm.advantage, ADVANTAGES)


def option_problems(algorithm: AlgorithmConfig) -> Iterator[str]:
    """Build the built-in loss and reduction, and try the estimator, with options whose names and types are right."""
    if [*algorithm_name_problems(algorithm), *advantage_name_problems(algorithm)]:
        return
    for field, part, known in (("loss", algorithm.loss, LOSSES), ("reduction", algorithm.reduction, REDUCTIONS)):
        try:
            if part.name in known:
                resolve_callable(field, part.name, known)(**part.options)
        except ValueError as error:
            yield f"algorithm.{field}.{error}"
    if (least := algorithm.least_spread) < 0:
        yield f"algorithm.advantage.eps={least:g} must be at least 0; correct it"
    for name in ("gamma", "lam") if algorithm.advantage.name in ADVANTAGES else ():
        if not 0 <= (value := algorithm.advantage.options.get(name, 1.0)) <= 1:
            yield f"algorithm.advantage.{name}={value:g} must be from 0 to 1; correct it"


def _part_problems(field: str, part: Part, known: Mapping[str, str]) -> Iterator[str]:
    yield from _unknown_or_not_importable(field, part.name, [*known])
    if part.name in known:
        problems = read_part(part.name, known[part.name]).option_problems(part.options)
        yield from (f"{field}.{problem}" for problem in problems)


def reward_problems(config: RunConfig) -> Iterator[str]:
    """Check the names of reward functions, and try the options of registered ones."""
    for index, function in enumerate(config.reward.functions):
        field = f"reward.functions.{index}.name={function.name}"
        if function.name in REGISTERED:
            try:
                try_options(function.name, resolve_reward(function.name), function.options)
            except ValueError as error:
                yield f"reward.functions.{index}.options={_shown(function.options)} do not fit: {error}"
            else:
                yield from _too_patient(config.reward, index)
        elif ":" not in function.name and not function.is_given:
            known = (*REGISTERED, ENVIRONMENT, AGENT)
            near = "".join(f" (did you mean {name}?)" for name in get_close_matches(function.name, known, n=1))
            yield f"{field} is unknown{near}; use {', '.join(known)} or {CUSTOM}"


def _shown(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options without credentials, which may be in headers and in a URL's user and query."""
    hidden: dict[str, Any] = {name: "..." for name in options if name == "headers"}
    if isinstance(url := options.get("url"), str):
        hidden["url"] = redact_url(url)
    return {**options, **hidden}


def _too_patient(reward: RewardConfig, index: int) -> Iterator[str]:
    """Check that the timeout of a service, or of tests, is below the worker's, which would end the worker."""
    function, bound = reward.functions[index], reward.timeout_s
    if function.name in {*SERVICES, "code"}:
        default = inspect.signature(resolve_reward(function.name)).parameters["timeout_s"].default
        seconds = function.options.get("timeout_s", default)
        if seconds >= bound:
            limit = f"timeout_s={seconds:g} of reward.functions.{index} ({function.name})"
            yield f"reward.timeout_s={bound:g} is not above the option {limit}; raise it above that"


def custom_code_problems(config: RunConfig) -> Iterator[str]:
    """Check that modules of custom rewards, environments and agents are on this machine."""
    named = {f"reward.functions.{index}.name": one.name for index, one in enumerate(config.reward.functions)}
    named["rollout.environment.name"] = config.rollout.environment.name or ""
    found = {field: name for field, name in named.items() if ":" in name}
    if (agent := config.rollout.agent.name) is not None:
        found["rollout.agent.name"] = agent
    for field, name in found.items():
        if problem := import_path_problem(name):
            yield f"{field}={name} {problem}"


def custom_reward_problems(config: RunConfig) -> Iterator[str]:
    """Have a reward worker, with its limits, import and call each custom function whose module is found.

    Registered functions that need answers of a certain form are called, too.
    """
    names = enumerate(function.name for function in config.reward.functions)
    found = [index for index, name in names if name in OF_ROWS or (":" in name and not import_path_problem(name))]
    first = first_row(config) if found else None
    sample = first and RewardItem(first[0].prompt, first[0].answer, first[0].answer, first[1])
    for index in found:
        yield from start_problems(config.reward, index, sample)


def environment_problems(config: RunConfig) -> Iterator[str]:
    """Check the environment's name and template, and create a built-in environment."""
    environment, prefix = config.rollout.environment, "rollout.environment"
    if environment.name is None:
        return
    if environment.name in ENVIRONMENTS:
        try:
            build_environment(environment.name, environment.options)
        except ValueError as error:
            yield f"{prefix}.options={dict(environment.options)} do not fit: {error}"
    elif ":" not in environment.name:
        yield f"{prefix}.name={environment.name} is unknown; use {', '.join(ENVIRONMENTS)} or {CUSTOM}"
    if environment.template is not None and environment.template.count(PLACE) != 1:
        yield f"{prefix}.template={environment.template!r} must contain {PLACE} once, for the observation; correct it"


def custom_environment_problems(config: RunConfig) -> list[str]:
    """Have a worker create a custom environment with its options and reset it for the first row, if it is found."""
    environment = config.rollout.environment
    if environment.name is None or ":" not in environment.name or import_path_problem(environment.name):
        return []
    first = first_row(config)
    return environment_start_problems(environment, first and first[0])


def _unknown_or_not_importable(field: str, name: str, known: Sequence[str]) -> Iterator[str]:
    if ":" not in name:
        yield from unknown(field, name, known, f", or {CUSTOM}")
    elif problem := import_path_problem(name):
        yield f"{field}={name} {problem}"


def agent_problems(config: RunConfig) -> Iterator[str]:
    """Check what judges the agent, the placeholders in its command, and that each node can have its address."""
    agent, reward, cluster = config.rollout.agent, config.reward, config.cluster
    judge = reward.functions[0].name
    if agent.is_set and "functions" not in reward.model_fields_set:
        yield f"reward.functions is not set, so {judge} would judge, not the agent; set it, e.g. to [{{name: agent}}]"
    for place in sorted({found for part in agent.command for found in _PLACE.findall(part)} - {*PLACES}):
        yield f"{_PREFIX}.command: {{{place}}} is unknown; use {', '.join(f'{{{name}}}' for name in PLACES)}"
    host, nodes = f"{_PREFIX}.host={agent.host}", cluster.nodes or 1
    if agent.host == NODE and nodes == 1 and cluster.address is None:
        yield f"{host}: a cluster of one node is on loopback; use an address of this host"
    if agent.host != NODE and nodes > 1 and not is_loopback(agent.host):
        yield f"{host} is the address of one node, but cluster.nodes={nodes}; use {NODE}"


def custom_agent_problems(config: RunConfig) -> list[str]:
    """Check that this host has the endpoint's address and a command's program. Have a worker import a function."""
    agent, cluster = config.rollout.agent, config.cluster
    if agent.host != NODE and (cluster.nodes or 1) == 1 and interface_of(agent.host) is None:
        return [f"{_PREFIX}.host={agent.host} is not an address of this machine; use one of its addresses"]
    if agent.command and shutil.which(agent.command[0]) is None:
        remedy = "give the command as a list, [python, agent.py]" if " " in agent.command[0] else "correct its path"
        return [f"{_PREFIX}.command: {agent.command[0]} is not a program on this machine; {remedy}"]
    if unset := [name for name in agent.environment if name not in os.environ]:
        return [f"{_PREFIX}.environment={','.join(unset)} is not set on this machine; export it, or remove the name"]
    if agent.name is None or agent.command or import_path_problem(agent.name):
        return []
    return AgentPool(agent.model_copy(update={"workers": 1})).start_problems()
