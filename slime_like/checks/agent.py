"""Checks of agents that call the model themselves."""

import re
import shutil
from collections.abc import Iterator

from slime_like.config.run import RunConfig
from slime_like.plugins.resolve import import_path_problem
from slime_like.sandbox.agents.command import PLACES
from slime_like.sandbox.agents.pool import start_problems

_PREFIX = "rollout.agent"
_PLACE = re.compile(r"\{([a-z_]+)\}")


def agent_problems(config: RunConfig) -> Iterator[str]:
    """Check the placeholders in the agent's command."""
    agent = config.rollout.agent
    for place in sorted({found for part in agent.command for found in _PLACE.findall(part)} - {*PLACES}):
        yield f"{_PREFIX}.command: {{{place}}} is unknown; use {', '.join(f'{{{name}}}' for name in PLACES)}"


def custom_agent_problems(config: RunConfig) -> list[str]:
    """Check that a command's program exists. Have a worker import an agent with its options, if its module is found."""
    agent = config.rollout.agent
    if agent.command and shutil.which(agent.command[0]) is None:
        remedy = "give the command as a list, [python, agent.py]" if " " in agent.command[0] else "correct its path"
        return [f"{_PREFIX}.command: {agent.command[0]} is not a program on this machine; {remedy}"]
    if agent.name is None or agent.command or import_path_problem(agent.name):
        return []
    return start_problems(agent)
