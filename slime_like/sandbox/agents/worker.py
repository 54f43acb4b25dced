"""One agent worker, started by the pool as ``python -m slime_like.sandbox.agents.worker PARENT_PID``."""

import asyncio
import inspect
import sys
from dataclasses import asdict
from typing import Any

from slime_like.errors import ConfigError
from slime_like.interfaces.agent import Agent, AgentResult, AgentTask
from slime_like.plugins.resolve import resolve_callable
from slime_like.plugins.traceback import code_of
from slime_like.sandbox.agents.command import run_command
from slime_like.sandbox.rewards.signature import require_options
from slime_like.sandbox.serving import Handler, adopt_orphans, serve, untrusted


def _prepare(setup: dict[str, Any]) -> tuple[Handler, dict[str, Any]]:
    if setup["name"] is None:
        return _command(setup["command"]), {}
    name, options = setup["name"], setup["options"]
    try:
        solve: Agent = resolve_callable("agent", name, {})
        if not inspect.iscoroutinefunction(solve):
            raise ValueError(f"agent {name!r} is no `async def`; make it one")
        require_options(f"agent {name!r}", inspect.signature(solve), ("task",), options)
    except ValueError as error:
        raise ConfigError([f"rollout.agent: {error}"]) from error
    code = code_of(solve)

    async def run(task: AgentTask) -> AgentResult:
        return await solve(task, **options)

    def handle(item: dict[str, Any]) -> dict[str, Any]:
        with untrusted(name, code):
            result = asyncio.run(run(AgentTask(**item["task"])))
            if not isinstance(result, AgentResult):
                raise TypeError(f"it returned a {type(result).__name__}; return an AgentResult")
            return _message(result)

    return handle, {}


def _command(command: list[str]) -> Handler:
    adopt_orphans()

    def handle(item: dict[str, Any]) -> dict[str, Any]:
        with untrusted(command[0], None):
            return _message(run_command(command, AgentTask(**item["task"])))

    return handle


def _message(result: AgentResult) -> dict[str, Any]:
    return {**asdict(result), "metadata": dict(result.metadata)}


if __name__ == "__main__":
    sys.exit(serve(_prepare))
