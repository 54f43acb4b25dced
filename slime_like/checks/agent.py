"""Settings of agents that call the model themselves."""

import re
import shutil
from collections.abc import Iterator
from importlib.util import find_spec

from slime_like.config.run import RunConfig
from slime_like.plugins.resolve import import_path_problem
from slime_like.sandbox.agents.command import PLACES
from slime_like.sandbox.agents.pool import start_problems

_PREFIX = "rollout.agent"
_PLACE = re.compile(r"\{([a-z_]+)\}")


def agent_problems(config: RunConfig) -> Iterator[str]:
    """Check the places in the agent's command."""
    agent = config.rollout.agent
    for place in sorted({found for part in agent.command for found in _PLACE.findall(part)} - {*PLACES}):
        yield f"{_PREFIX}.command: {{{place}}} is unknown; use {', '.join(f'{{{name}}}' for name in PLACES)}"


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
