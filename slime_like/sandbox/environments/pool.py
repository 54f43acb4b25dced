"""Steps of many conversations in a few worker processes with bounds on time, memory and CPU. Belongs to one loop."""

import asyncio
from dataclasses import asdict
from typing import Any

from slime_like.config.rollout import EnvironmentConfig
from slime_like.errors import EnvironmentFailure
from slime_like.interfaces.environment import Step, Task
from slime_like.sandbox.failure_budget import FailureBudget
from slime_like.sandbox.pool import WorkerKind, WorkerPool

_MODULE = "slime_like.sandbox.environments.worker"
_SUSPICIOUS_STEPS = 8


class StepFailed(Exception):
    """A step without an outcome: it costs its conversation alone.

    Attributes:
        reason: "timeout", "crash", "memory", "cpu" or "error".
        detail: what the environment raised, where it did.
    """

    def __init__(self, reason: str, detail: str = "") -> None:
        self.reason = reason
        self.detail = detail
        super().__init__(f"{reason}: {detail}" if detail else reason)


class EnvironmentPool:
    """``config.workers`` processes that take one step at a time each; a hung or dead one is replaced.

    The kernel ends the workers together with the thread that called ``start``, which is the loop's.
    """

    def __init__(self, config: EnvironmentConfig) -> None:
        self._name = config.name
        kind = WorkerKind(
            _MODULE,
            {"name": config.name, "options": config.options},
            who="an environment worker",
            section="rollout.environment",
            subject=f"rollout.environment.name={config.name}",
            error=EnvironmentFailure,
        )
        self._workers = WorkerPool(kind, config)
        self._budget = FailureBudget(_SUSPICIOUS_STEPS, first_only=True)

    @property
    def process_ids(self) -> tuple[int, ...]:
        return tuple(sorted(self._workers.process_ids))

    @property
    def judges_cut_turns(self) -> bool:
        """Whether the environment is asked about a turn that its limit cut off; known after ``start``."""
        return bool(self._workers.about["judges_cut_turns"])

    async def start(self) -> None:
        """Wait for every worker. Raises ``EnvironmentFailure`` where it cannot be used, or a start takes too long."""
        await self._workers.launch()
        await self._workers.ready()

    async def step(self, task: Task, state: Any, response: str, first: bool, truncated: bool = False) -> Step:
        """Run one step, the first of a conversation with its reset; waits for a free worker.

        Raises ``StepFailed`` for this step alone, and ``EnvironmentFailure`` where none of the first steps of all had
        an outcome, or workers do not start any more.
        """
        answers: list[dict[str, Any]] = []
        item = {"task": asdict(task), "state": state, "response": response, "first": first, "truncated": truncated}
        await self._workers.ask([item], answers.append)
        (answer,) = answers
        self._budget.record("reason" not in answer)
        if "reason" not in answer:
            return Step(**answer)
        failed = StepFailed(answer["reason"], answer.get("detail", ""))
        if not self._budget.exhausted:
            raise failed
        failure = EnvironmentFailure(
            f"environment {self._name} had no outcome for any of its first {_SUSPICIOUS_STEPS} steps, last by {failed}",
            code="environment-fails",
            remedy="correct it, or raise rollout.environment.timeout_s",
        )
        self._workers.fail(failure)
        raise failure

    async def close(self) -> None:
        """End every worker, by its process id, within a bound."""
        await self._workers.close()


def start_problems(config: EnvironmentConfig) -> list[str]:
    """Problems that a worker finds when it makes the environment, with its options."""

    async def start() -> list[str]:
        pool = EnvironmentPool(config.model_copy(update={"workers": 1}))
        try:
            await pool.start()
        except EnvironmentFailure as error:
            return str(error).splitlines()
        finally:
            await pool.close()
        return []

    return asyncio.run(start())
