"""Agents in worker processes with limits on time, memory and CPU. A pool belongs to one event loop."""

import asyncio
import shutil
import tempfile
from dataclasses import asdict
from pathlib import Path

from slime_like.config.rollout import AgentConfig
from slime_like.errors import AgentFailure
from slime_like.interfaces.agent import AgentResult, AgentTask
from slime_like.sandbox.pool import WorkerKind
from slime_like.sandbox.single_items import SingleItems


class AgentPool(SingleItems):
    """``config.workers`` processes that each run one agent at a time. A hung or dead process is replaced.

    With ``needs_result``, a command must write a result.
    """

    def __init__(self, config: AgentConfig, logs: tuple[Path, str] | None = None, *, needs_result: bool = True) -> None:
        subject = f"name={config.name}" if config.name is not None else f"command={list(config.command)}"
        kind = WorkerKind(
            "slime_like.sandbox.agents.worker",
            {**config.model_dump(include={"name", "options", "command"}), "needs_result": needs_result},
            section="rollout.agent",
            subject=f"rollout.agent.{subject}",
            error=AgentFailure,
            repeats=False,  # turns that the first run sampled would get the second run's reward
        )
        super().__init__(kind, config, logs, items="rollouts", code="agent-fails")

    async def solve(self, task: AgentTask) -> AgentResult:
        """Wait for a free worker and run the agent. If the caller gives up, its process is killed with all children.

        Raises:
            NoOutcome: this rollout failed.
            AgentFailure: all first rollouts failed, or workers no longer start.
        """
        directory = tempfile.mkdtemp(prefix="agent-")
        try:
            return AgentResult(**await self.ask_one({"task": asdict(task), "directory": directory}))
        finally:
            await asyncio.to_thread(shutil.rmtree, directory, ignore_errors=True)


def start_problems(config: AgentConfig) -> list[str]:
    """Let a worker import the agent, and return the problems it finds."""
    return AgentPool(config.model_copy(update={"workers": 1})).start_problems()
