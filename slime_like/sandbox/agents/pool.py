"""Agents in worker processes with bounds on time, memory and CPU. Belongs to one loop."""

from dataclasses import asdict
from pathlib import Path

from slime_like.config.rollout import AgentConfig
from slime_like.errors import AgentFailure
from slime_like.interfaces.agent import AgentResult, AgentTask
from slime_like.sandbox import single_items
from slime_like.sandbox.pool import WorkerKind
from slime_like.sandbox.single_items import CodePool, SingleItems

_MODULE = "slime_like.sandbox.agents.worker"
_SUSPICIOUS_ROLLOUTS = 8


class AgentPool(CodePool):
    """``config.workers`` processes that run one agent at a time each; a hung or dead one is replaced."""

    def __init__(self, config: AgentConfig, logs: tuple[Path, str] | None = None) -> None:
        subject = f"name={config.name}" if config.name is not None else f"command={list(config.command)}"
        kind = WorkerKind(
            _MODULE,
            {"name": config.name, "options": config.options, "command": list(config.command)},
            who="an agent worker",
            section="rollout.agent",
            subject=f"rollout.agent.{subject}",
            error=AgentFailure,
            repeats=False,  # what the first run had sampled would get the second one's reward
        )
        workers = SingleItems(
            kind,
            config,
            what=f"rollout.agent.{subject}",
            items="rollouts",
            suspicious=_SUSPICIOUS_ROLLOUTS,
            code="agent-fails",
            logs=logs,
        )
        super().__init__(workers)

    async def solve(self, task: AgentTask) -> AgentResult:
        """Run the agent; waits for a free worker. A cancelled run is killed with all that it has started.

        Raises ``NoOutcome`` for this rollout alone, and ``AgentFailure`` where none of the first had an outcome, or
        workers do not start any more.
        """
        return AgentResult(**await self._workers.ask_one({"task": asdict(task)}))


def start_problems(config: AgentConfig) -> list[str]:
    """Problems that a worker finds when it imports the agent."""
    one = config.model_copy(update={"workers": 1})
    return single_items.start_problems(lambda: AgentPool(one), AgentFailure)
