"""Failures that count as broken reward functions and end the run; one bad response costs its sample alone."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from slime_like.config import RewardConfig
from slime_like.errors import RewardError
from slime_like.sandbox.failure_budget import FailureBudget
from slime_like.sandbox.rewards.registry import LOCAL, SERVICES

_SHOWN_CHARS = 60
_SUSPICIOUS_ITEMS = 8
"""Responses that hang, one after the other, before any other one is answered."""
_SUSPICIOUS_PROMPTS = 8
"""Number of prompts in a row whose responses all failed. Not responses: eight to one prompt fail together where its row
has an answer that nothing can be compared with, and a call may be about one prompt alone."""


class RewardFailures:
    """Failures over all calls of a pool.

    Attributes:
        has_answered: some item has had a reward.
        has_foreign: a function is custom, or a service.
    """

    def __init__(self, config: RewardConfig) -> None:
        self.has_answered = False
        self._functions = [function.name for function in config.computed]
        self._timeout_s = config.timeout_s
        # What built-in ones give up on is the responses' fault: a policy may write eight huge powers in a row.
        self.has_foreign = any(name not in LOCAL for name in self._functions)
        self._broken = ("error", "crash", "timeout") if self.has_foreign else ("error",)
        self._budgets = {what: FailureBudget(_SUSPICIOUS_PROMPTS) for what in ("prompts", "groups")}

    def record(
        self,
        what: Literal["prompts", "groups"],
        count: int,
        answers: Sequence[Mapping[str, Any]],
        last: tuple[str, str],
    ) -> None:
        """Record one call's answers about ``count`` prompts or groups; ``last`` is its last prompt and ground truth.

        Raises ``RewardError`` where too many in a row had no response with a reward: a bug, not a reward of 0.
        """
        budget = self._budgets[what]
        failed = bool(answers) and all(answer.get("reason") in self._broken for answer in answers)
        budget.record(not failed, count)
        if budget.exhausted:
            prompt, truth = map(_shown, last)
            where = f"last (prompt {prompt} and answer {truth})"
            self._refuse(answers[-1], f"failed on all responses to {budget.failures} {what} in a row, {where}")

    def refuse_hanging(self, answer: Mapping[str, Any], prompts: int) -> None:
        """Raise ``RewardError`` unless one prompt may be to blame, of functions that have answered before."""
        if self.has_foreign and (prompts > 1 or not self.has_answered):
            self._refuse(answer, f"failed on each of the first {_SUSPICIOUS_ITEMS} responses of a batch, last")

    def _refuse(self, answer: Mapping[str, Any], what: str) -> None:
        name, reason = answer.get("function"), answer["reason"]
        why, remedy = answer.get("detail"), "correct the function or the answers in the data"
        if name in SERVICES:
            remedy = "see to the service, or to reward.functions"
        elif why is None and reason == "timeout":
            why = f"no answer within reward.timeout_s={self._timeout_s:g} s"
            remedy = "raise that, or correct the function"
        elif why is None:
            why = "the end of its worker"
        who = f"reward function {name}" if name else f"reward.functions ({', '.join(self._functions)})"
        raise RewardError(
            f"{who} {what} with {why}",
            code="reward-function-fails",
            remedy=remedy,
            users_traceback=answer.get("traceback"),
        )


class BatchTimeouts:
    """Responses of one batch that hang: broken functions are rejected at the eighth, not after hundreds."""

    def __init__(self, failures: RewardFailures) -> None:
        self._failures = failures
        self._budget = FailureBudget(_SUSPICIOUS_ITEMS, first_only=True)
        self._prompts: set[str] = set()

    def record(self, prompt: str, answer: Mapping[str, Any]) -> None:
        """Raises ``RewardError`` where the first answers of the batch are all timeouts."""
        timed_out = answer.get("reason") == "timeout"
        self._budget.record(not timed_out)
        if timed_out:
            self._prompts.add(prompt)
        if self._budget.failures == _SUSPICIOUS_ITEMS:
            self._failures.refuse_hanging(answer, len(self._prompts))
        self._failures.has_answered |= "reason" not in answer


def _shown(text: str) -> str:
    return repr(text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}...")
