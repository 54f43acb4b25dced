"""One item at a time in a pool of workers, and the end of code that never has an outcome. Belongs to one loop."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

from slime_like.config.rollout import AgentConfig, EnvironmentConfig
from slime_like.errors import SlimeLikeError
from slime_like.sandbox.failure_budget import FailureBudget
from slime_like.sandbox.pool import WorkerKind, WorkerPool


class NoOutcome(Exception):
    """An item without an outcome: it costs its rollout alone.

    Attributes:
        reason: "timeout", "crash", "memory", "cpu" or "error".
        detail: what the user's code raised, where it did.
    """

    def __init__(self, reason: str, detail: str = "") -> None:
        self.reason = reason
        self.detail = detail
        super().__init__(f"{reason}: {detail}" if detail else reason)

    def as_failure(self, function: str) -> dict[str, str]:
        """``Conversation.failure`` of the rollout; ``function``: the code without an outcome."""
        return {"reason": self.reason, "function": function, **({"detail": self.detail} if self.detail else {})}


class SingleItems(WorkerPool):
    """A pool whose items come one by one.

    Args:
        what: the code and its name, for messages.
        items: what an item is called.
        suspicious: so many first items without an outcome, and none with one, are a fault of the code.
        code: of the error that is raised then.
    """

    def __init__(
        self,
        kind: WorkerKind,
        limits: EnvironmentConfig | AgentConfig,
        *,
        what: str,
        items: str,
        suspicious: int,
        code: str,
        logs: tuple[Path, str] | None,
    ) -> None:
        super().__init__(kind, limits, logs)
        self._budget = FailureBudget(suspicious, first_only=True)
        self._what, self._items, self._code = what, items, code

    async def start(self) -> None:
        """Wait for every worker. Raises the kind's error where its code cannot be used, or a start takes too long."""
        await self.launch()
        await self.ready()

    async def ask_one(self, item: dict[str, Any]) -> dict[str, Any]:
        """The answer to one item; waits for a free worker.

        Raises ``NoOutcome`` for this item alone, and the kind's error where none of the first items of all had an
        outcome, or workers do not start any more.
        """
        answers: list[dict[str, Any]] = []
        await self.ask([item], answers.append)
        (answer,) = answers
        self._budget.record("reason" not in answer)
        if "reason" not in answer:
            return answer
        failed = NoOutcome(answer["reason"], answer.get("detail", ""))
        if not self._budget.exhausted:
            raise failed
        failure = self._kind.error(
            f"{self._what} had no outcome for any of its first {self._budget.limit} {self._items}, last by {failed}",
            code=self._code,
            remedy=f"correct it, or raise {self._kind.section}.timeout_s",
        )
        self.fail(failure)
        raise failure


Pool = TypeVar("Pool", bound="CodePool")


class CodePool:
    """Processes that run one user's code, an item each at a time; a hung or dead one is replaced."""

    def __init__(self, workers: SingleItems) -> None:
        self._workers = workers

    @property
    def process_ids(self) -> tuple[int, ...]:
        return tuple(sorted(self._workers.process_ids))

    async def start(self) -> None:
        """Wait for every worker. Raises the kind's error where its code cannot be used, or a start takes too long."""
        await self._workers.start()

    async def close(self) -> None:
        """End every worker, by its process id, within a bound."""
        await self._workers.close()


def start_problems(
    make_pool: Callable[[], Pool],
    error: type[SlimeLikeError],
    attempt: Callable[[Pool], Awaitable[None]] | None = None,
    what: str = "",
) -> list[str]:
    """Problems that workers find when they import the code, and what the attempt finds.

    Args:
        make_pool: called in an event loop.
        error: the kind's.
        attempt: called with the started pool; one without an outcome is a problem.
        what: what fails then.
    """

    async def start() -> list[str]:
        pool = make_pool()
        try:
            await pool.start()
            if attempt is not None:
                await attempt(pool)
        except error as problem:
            return str(problem).splitlines()
        except NoOutcome as failed:
            return [f"{what}: {failed}; correct it, or the row"]
        finally:
            await pool.close()
        return []

    return asyncio.run(start())
