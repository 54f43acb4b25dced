"""One agent worker, started by the pool as ``python -m slime_like.sandbox.agents.worker PARENT_PID``."""

import asyncio
import inspect
import sys
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from types import CodeType
from typing import Any

from slime_like.errors import ConfigError
from slime_like.interfaces.agent import Agent, AgentResult, AgentTask
from slime_like.plugins.resolve import require_options, resolve_callable
from slime_like.plugins.traceback import code_of
from slime_like.sandbox.agents.command import run_command
from slime_like.sandbox.serving import Handler, adopt_orphans, serve, untrusted
from slime_like.system.processes import end_descendants, process_ids, resident_bytes

_Run = Callable[[AgentTask, Path], AgentResult]


def _prepare(setup: dict[str, Any]) -> tuple[Handler, dict[str, Any]]:
    command: list[str] = setup["command"]
    code: CodeType | None = None
    adopt_orphans()
    run: _Run
    if setup["name"] is None:
        needs_result, inherited = setup["needs_result"], setup["environment"]
        name, run = command[0], partial(run_command, command, needs_result=needs_result, inherited=inherited)
    else:
        name, (run, code) = setup["name"], _function(setup["name"], setup["options"])
    of_module = process_ids()

    def handle(item: dict[str, Any]) -> dict[str, Any]:
        try:
            with untrusted(name, code):
                result = run(AgentTask(**item["task"]), Path(item["directory"]))
                if not isinstance(result, AgentResult):
                    raise TypeError(f"it returned a {type(result).__name__}; return an AgentResult")
                return {**asdict(result), "metadata": dict(result.metadata)}
        finally:
            end_descendants(keep=of_module)

    return handle, {}


def _function(name: str, options: dict[str, Any]) -> tuple[_Run, CodeType | None]:
    try:
        solve: Agent = resolve_callable("agent", name, {})
        if not inspect.iscoroutinefunction(solve):
            raise ValueError(f"agent {name!r} is not an `async def`; make it one")
        require_options(f"agent {name!r}", solve, options, ("task",))
    except ValueError as error:
        raise ConfigError([f"rollout.agent: {error}"]) from error
    return lambda task, _: asyncio.run(solve(task, **options)), code_of(solve)


if __name__ == "__main__":
    try:
        sys.exit(serve(_prepare, resident_bytes))
    finally:
        end_descendants()
