"""Pools that run one user's code, one item at a time: agents and environments. A pool belongs to one event loop."""

import asyncio
import math
import shutil
import tempfile
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Any

from slime_like.config.rollout import AgentConfig, EnvironmentConfig
from slime_like.errors import AgentFailure, EnvironmentFailure
from slime_like.interfaces.user_code import AgentResult, AgentTask, Step, Task
from slime_like.sandbox.pool import WorkerKind, WorkerPool
from slime_like.system.spans import span

_SUSPICIOUS_ITEMS = 8
"""Number of first items that must not all fail."""


class FailureBudget:
    """Counter of failures before the first success, after ``limit`` of which code counts as broken."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._left: float = limit

    def exhausted(self, ok: bool) -> bool:
        """Record a result. Return whether the budget is exhausted."""
        self._left = math.inf if ok else self._left - 1
        return self._left <= 0


class NoOutcome(Exception):
    """An item without an outcome. Only its rollout fails.

    Attributes:
        reason: "timeout", "crash", "memory", "cpu" or "error".
        detail: error of the user's code, if it raised.
        fault: as in ``serving.untrusted``; then the rollout is an answer with reward 0.
    """

    def __init__(self, reason: str, detail: str = "", fault: str = "") -> None:
        self.reason = reason
        self.detail = detail
        self.fault = fault
        super().__init__(f"{reason}: {detail}" if detail else reason)

    def as_failure(self, function: str) -> dict[str, str]:
        """Return the rollout's ``Conversation.failure``. ``function`` names the code."""
        found = {"reason": self.reason, "function": function, "detail": self.detail, "fault": self.fault}
        return {name: text for name, text in found.items() if text}


class SingleItems(WorkerPool):
    """Pool whose workers take one item each. It fails if none of the first items has an outcome, with ``code``."""

    items: str
    code: str

    @cached_property
    def _budget(self) -> FailureBudget:
        return FailureBudget(_SUSPICIOUS_ITEMS)

    async def ask_one(self, item: dict[str, Any]) -> dict[str, Any]:
        """Wait for a free worker and return its answer.

        Raises:
            NoOutcome: this item failed.
            SlimeLikeError: the kind's error: all first items failed, or workers no longer start.
        """
        with span(self._kind.section.rpartition(".")[2], self.items[:-1]):
            answer = await self.ask(item)
        assert answer is not None
        exhausted = self._budget.exhausted("reason" not in answer)
        if "reason" not in answer:
            return answer
        failed = NoOutcome(answer["reason"], answer.get("detail", ""), answer.get("fault", ""))
        if not exhausted:
            raise failed
        setting = {"timeout": "timeout_s", "cpu": "timeout_s", "memory": "memory_mb"}.get(failed.reason)
        failure = self._kind.error(
            f"{self._kind.subject} failed in each of its first {self._budget.limit} {self.items}, most recently with "
            f"{failed}",
            code=self.code,
            remedy="correct it" + (f", or raise {self._kind.section}.{setting}" if setting else ""),
        )
        self.fail(failure)
        raise failure


class AgentPool(SingleItems):
    """``config.workers`` processes that each run one agent at a time. ``needs_result``: a command must write one."""

    items, code = "rollouts", "agent-fails"

    def __init__(self, config: AgentConfig, logs: tuple[Path, str] | None = None, *, needs_result: bool = True) -> None:
        subject = f"name={config.name}" if config.name is not None else f"command={list(config.command)}"
        kind = WorkerKind(
            "slime_like.sandbox.agent_worker",
            {
                **config.model_dump(include={"name", "options", "command", "environment", "answer"}),
                "needs_result": needs_result,
            },
            section="rollout.agent",
            subject=f"rollout.agent.{subject}",
            error=AgentFailure,
            repeats=False,  # turns that the first run sampled would get the second run's reward
        )
        super().__init__(kind, config, logs)

    async def solve(self, task: AgentTask) -> AgentResult:
        """Wait for a free worker and run the agent. If the caller gives up, its process is killed with all children.

        Raises ``NoOutcome`` if this rollout failed, and ``AgentFailure`` if all first rollouts failed, or workers no
        longer start.
        """
        directory = tempfile.mkdtemp(prefix="agent-")
        try:
            return AgentResult(**await self.ask_one({"task": asdict(task), "directory": directory}))
        finally:
            await asyncio.to_thread(shutil.rmtree, directory, ignore_errors=True)


class EnvironmentPool(SingleItems):
    """``config.workers`` processes that each run one step of a conversation at a time."""

    items, code = "steps", "environment-fails"

    def __init__(self, config: EnvironmentConfig, logs: tuple[Path, str] | None = None) -> None:
        kind = WorkerKind(
            "slime_like.sandbox.environment_worker",
            {"name": config.name, "options": config.options},
            section="rollout.environment",
            subject=f"rollout.environment.name={config.name}",
            error=EnvironmentFailure,
        )
        super().__init__(kind, config, logs)

    @property
    def judges_cut_turns(self) -> bool:
        """True if the environment receives turns that a token limit cut off. Known after ``start``."""
        return bool(self.about["judges_cut_turns"])

    async def step(self, task: Task, state: Any, response: str, first: bool, truncated: bool = False) -> Step:
        """Wait for a free worker and run one step. The first step of a conversation includes its reset.

        Raises ``NoOutcome`` if this step failed, and ``EnvironmentFailure`` if all first steps failed, or workers no
        longer start.
        """
        item = {"task": asdict(task), "state": state, "response": response, "first": first, "truncated": truncated}
        return Step(**await self.ask_one(item))


def environment_start_problems(config: EnvironmentConfig, task: Task | None) -> list[str]:
    """Let a worker create the environment and reset it for ``task``, if given. Return the problems."""
    pool = EnvironmentPool(config.model_copy(update={"workers": 1}))
    if task is None:
        return pool.start_problems()
    item = {"task": asdict(task), "first": True, "response": None}

    async def reset() -> list[str]:
        try:
            await pool.ask_one(item)
        except NoOutcome as failed:
            what = f"rollout.environment.name={config.name} cannot be reset for the first row of the data"
            return [f"{what}: {failed}; correct it, or the row"]
        return []

    return pool.start_problems(reset)
