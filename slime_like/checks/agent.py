"""Settings of agents that call the model themselves."""

import re
import shutil
from collections.abc import Iterator
from importlib.util import find_spec

from slime_like.checks.sampling import rejected_for_several_rows
from slime_like.config.rollout import AgentConfig
from slime_like.config.run import RunConfig
from slime_like.plugins.import_path import import_path_problem, source_problem
from slime_like.sandbox.agents.command import PLACES
from slime_like.sandbox.agents.pool import start_problems

_PREFIX = "rollout.agent"
_PLACE = re.compile(r"\{([a-z_]+)\}")


def agent_problems(config: RunConfig) -> Iterator[str]:
    """The agent's name or command, and settings that do not go with it."""
    agent = config.rollout.agent
    if not agent.is_set:
        defaults = AgentConfig()  # which a run's config.yaml writes out
        changed = sorted(key for key, value in agent if value != getattr(defaults, key))
        if changed:
            yield f"{_PREFIX}.{changed[0]} is set, but {_PREFIX}.name and command are not; set one, or leave it out"
        return
    yield from _own_problems(agent)
    if config.rollout.environment.name is not None:
        yield f"{_PREFIX} and rollout.environment are both set; a rollout has one of them, remove the other"
    if config.algorithm.overlong_buffer is not None:
        yield (
            f"algorithm.overlong_buffer={config.algorithm.overlong_buffer} penalises the length of one response, and "
            f"{_PREFIX} has several; remove it"
        )


def _own_problems(agent: AgentConfig) -> Iterator[str]:
    if agent.name is not None and agent.command:
        yield f"{_PREFIX}.name={agent.name} and {_PREFIX}.command are both set; remove one"
    elif agent.name is None:
        if agent.options:
            yield f"{_PREFIX}.options={dict(agent.options)}: a command takes none; give it arguments"
        unknown = {found for part in agent.command for found in _PLACE.findall(part)} - {*PLACES}
        for place in sorted(unknown):
            yield f"{_PREFIX}.command: {{{place}}} is unknown; use {', '.join(f'{{{name}}}' for name in PLACES)}"
    elif problem := source_problem(agent.name):
        yield f"{_PREFIX}.name={agent.name} {problem}"


def row_problems(config: RunConfig) -> Iterator[str]:
    """A history that is not only appended to makes several rows."""
    if config.rollout.agent.is_set:
        yield from rejected_for_several_rows(config)


def server_problems(config: RunConfig) -> Iterator[str]:
    """The package that serves agents, on this machine."""
    if config.rollout.agent.is_set and find_spec("aiohttp") is None:
        yield f"{_PREFIX} needs the package aiohttp; pip install -e '.[train]' in the clone"


def custom_agent_problems(config: RunConfig) -> list[str]:
    """An agent whose module is found is imported once, with its options, by a worker with its limits; the program of a
    command must be there."""
    agent = config.rollout.agent
    if agent.command and shutil.which(agent.command[0]) is None:
        remedy = "give the command as a list, [python, agent.py]" if " " in agent.command[0] else "correct its path"
        return [f"{_PREFIX}.command: {agent.command[0]} is no program on this machine; {remedy}"]
    if agent.name is None or agent.command or import_path_problem(agent.name):
        return []
    return start_problems(agent)
