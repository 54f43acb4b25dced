"""Detection of broken reward functions, which end the run. A single bad response costs only its sample."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from slime_like.config import RewardConfig
from slime_like.errors import RewardError
from slime_like.sandbox.failure_budget import FailureBudget
from slime_like.sandbox.rewards.registry import LOCAL, SERVICES

_SHOWN_CHARS = 60
_SUSPICIOUS_ITEMS = 8
"""Number of responses that hang, one after the other, before any other is answered."""
_SUSPICIOUS_PROMPTS = 8
"""Number of prompts in a row whose responses all failed. Prompts are counted, because all responses to one prompt fail
together if its row has an unusable answer, and a call may be about a single prompt."""


class RewardFailures:
    """Failures over all calls of a pool.

    Attributes:
        has_answered: whether any item got a reward.
        has_foreign: whether any function is custom, or a service.
    """

    def __init__(self, config: RewardConfig) -> None:
        self.has_answered = False
        self._functions = [function.name for function in config.computed]
        self._timeout_s = config.timeout_s
        # If included functions time out, the responses are at fault: a policy may write eight huge powers in a row.
        self.has_foreign = any(name not in LOCAL for name in self._functions)
        self._broken = ("error", "crash", "timeout") if self.has_foreign else ("error",)
        self._failed = {"prompts": 0, "groups": 0}

    def record(
        self,
        what: Literal["prompts", "groups"],
        count: int,
        answers: Sequence[Mapping[str, Any]],
        last: tuple[str, str],
    ) -> None:
        """Record the answers of one call about ``count`` prompts or groups. ``last`` is its last prompt and answer.

        Raises ``RewardError`` if too many in a row failed on all responses: that is a bug, not a reward of 0.
        """
        failed = bool(answers) and all(answer.get("reason") in self._broken for answer in answers)
        self._failed[what] = self._failed[what] + count if failed else 0
        if self._failed[what] >= _SUSPICIOUS_PROMPTS:
            prompt, truth = (repr(text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}...") for text in last)
            where = f"most recently (prompt {prompt} and answer {truth})"
            self._reject(answers[-1], f"failed on all responses to {self._failed[what]} {what} in a row, {where}")

    def reject_hanging(self, answer: Mapping[str, Any], prompts: int) -> None:
        """Raise ``RewardError``, unless a single prompt may be at fault because the functions have answered before."""
        if self.has_foreign and (prompts > 1 or not self.has_answered):
            self._reject(answer, f"failed on each of the first {_SUSPICIOUS_ITEMS} responses of a batch, most recently")

    def _reject(self, answer: Mapping[str, Any], what: str) -> None:
        name, reason = answer.get("function"), answer["reason"]
        why, remedy = answer.get("detail"), "correct the function or the answers in the data"
        if name in SERVICES:
            remedy = "check the service, or reward.functions"
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
    """Hanging responses of one batch. Broken functions are rejected at the eighth, not after hundreds."""

    def __init__(self, failures: RewardFailures) -> None:
        self._failures = failures
        self._budget = FailureBudget(_SUSPICIOUS_ITEMS)
        self._prompts: set[str] = set()

    def record(self, prompt: str, answer: Mapping[str, Any]) -> None:
        """Record one answer. Raises ``RewardError`` if the first answers of the batch are all timeouts."""
        timed_out = answer.get("reason") == "timeout"
        self._budget.record(not timed_out)
        if timed_out:
            self._prompts.add(prompt)
        if self._budget.failures == _SUSPICIOUS_ITEMS:
            self._failures.reject_hanging(answer, len(self._prompts))
        self._failures.has_answered |= "reason" not in answer
