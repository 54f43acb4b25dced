"""Pools that run one user's code, one item at a time."""

from pathlib import Path
from typing import Any

from slime_like.config.rollout import AgentConfig, EnvironmentConfig
from slime_like.sandbox.failure_budget import FailureBudget
from slime_like.sandbox.pool import WorkerKind, WorkerPool

_SUSPICIOUS_ITEMS = 8
"""Number of first items that must not all fail."""


class NoOutcome(Exception):
    """An item without an outcome. Only its rollout fails.

    Attributes:
        reason: "timeout", "crash", "memory", "cpu" or "error".
        detail: error of the user's code, if it raised.
    """

    def __init__(self, reason: str, detail: str = "") -> None:
        self.reason = reason
        self.detail = detail
        super().__init__(f"{reason}: {detail}" if detail else reason)

    def as_failure(self, function: str) -> dict[str, str]:
        """Return the rollout's ``Conversation.failure``. ``function`` names the code."""
        return {"reason": self.reason, "function": function, **({"detail": self.detail} if self.detail else {})}


class SingleItems(WorkerPool):
    """Pool whose workers take one item each. It fails if none of the first items has an outcome.

    Args:
        items: what messages call the items.
        code: error code of that failure.
    """

    def __init__(
        self,
        kind: WorkerKind,
        limits: EnvironmentConfig | AgentConfig,
        logs: tuple[Path, str] | None,
        *,
        items: str,
        code: str,
    ) -> None:
        super().__init__(kind, limits, logs)
        self._budget = FailureBudget(_SUSPICIOUS_ITEMS)
        self._items, self._code = items, code

    async def ask_one(self, item: dict[str, Any]) -> dict[str, Any]:
        """Wait for a free worker and return its answer.

        Raises:
            NoOutcome: this item failed.
            SlimeLikeError: the kind's error: all first items failed, or workers no longer start.
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
        setting = {"timeout": "timeout_s", "cpu": "timeout_s", "memory": "memory_mb"}.get(failed.reason)
        failure = self._kind.error(
            f"{self._kind.subject} failed in each of its first {self._budget.limit} {self._items}, most recently with "
            f"{failed}",
            code=self._code,
            remedy="correct it" + (f", or raise {self._kind.section}.{setting}" if setting else ""),
        )
        self.fail(failure)
        raise failure
