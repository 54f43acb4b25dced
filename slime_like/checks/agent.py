"""Checks of agents that call the model themselves."""

import os
import re
import shutil
from collections.abc import Iterator

from slime_like.config.rollout import NODE, AgentConfig, RewardConfig
from slime_like.config.sections import ClusterConfig
from slime_like.plugins.resolve import import_path_problem
from slime_like.sandbox.agent_worker import PLACES
from slime_like.sandbox.single_items import AgentPool
from slime_like.system.network import interface_of, is_loopback

_PREFIX = "rollout.agent"
_PLACE = re.compile(r"\{([a-z_]+)\}")


def agent_problems(agent: AgentConfig, reward: RewardConfig, cluster: ClusterConfig) -> Iterator[str]:
    """Check what judges the agent, the placeholders in its command, and that each node can have its address."""
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


def custom_agent_problems(agent: AgentConfig, cluster: ClusterConfig) -> list[str]:
    """Check that this host has the endpoint's address and a command's program. Have a worker import a function."""
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
