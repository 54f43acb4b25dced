"""Bounds on what hanging responses and broken reward functions cost. A single bad response costs only its sample."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from slime_like.config import RewardConfig
from slime_like.errors import RewardError
from slime_like.sandbox.rewards.registry import LOCAL, SERVICES

_SHOWN_CHARS = 60
_SUSPICIOUS_ITEMS = 8
"""Number of responses that hang, one after the other, before any other is answered."""
_SUSPICIOUS_PROMPTS = 8
"""Number of prompts in a row whose responses all failed. Prompts are counted, because all responses to one prompt fail
together if its row has an unusable answer, and a call may be about a single prompt."""
_FULL_TIMEOUTS = 8
_MAX_TIMEOUTS = 100
_SHORTENED = 0.1


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

    def record_first(self, hung: list[str | None], prompt: str, answer: Mapping[str, Any]) -> None:
        """Record one answer. ``hung`` collects the prompts of a batch's timeouts, and ``None`` for other answers.

        Raises ``RewardError`` if the first eight answers of a batch are all timeouts, unless a single prompt may be at
        fault because the functions have answered before.
        """
        hung.append(prompt if answer.get("reason") == "timeout" else None)
        all_hung = self.has_foreign and len(hung) == _SUSPICIOUS_ITEMS and None not in hung
        if all_hung and (len(set(hung)) > 1 or not self.has_answered):
            self._reject(answer, f"failed on each of the first {_SUSPICIOUS_ITEMS} responses of a batch, most recently")
        self.has_answered |= "reason" not in answer

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


class TimeBudget:
    """Counter of a step's timeouts. A policy may learn to write towers of powers, each of which hangs.

    Eight of a step's responses per worker may take ``timeout_s``, the next ones a tenth of it. After 100 per worker,
    the remaining responses are not scored. The count restarts with the next step's responses.

    Args:
        responses: number of responses of a step. Each call may be about a part of a step.
        shorten: whether all functions are quick unless they hang.
    """

    def __init__(self, timeout_s: float, workers: int, responses: int, shorten: bool) -> None:
        self._timeout_s = timeout_s
        self._full = _FULL_TIMEOUTS * workers if shorten else _MAX_TIMEOUTS * workers
        self._max = _MAX_TIMEOUTS * workers
        self._responses = responses
        self._seen = self._timeouts = 0

    @property
    def timeout_s(self) -> float:
        """Seconds that the next response may take; 0 if it is not to be scored."""
        if self._timeouts >= self._max:
            return 0.0
        return self._timeout_s * (1.0 if self._timeouts < self._full else _SHORTENED)

    @property
    def refusal(self) -> dict[str, Any]:
        return {"reason": "budget", "detail": f"not scored: {self._timeouts} responses of this step timed out before"}

    def record(self, answer: dict[str, Any]) -> dict[str, Any]:
        """Count one response's answer and return it. A timeout after less than ``timeout_s`` gets a detail."""
        bound = self.timeout_s
        self._seen += 1
        self._timeouts += answer.get("reason") in ("timeout", "cpu")
        if self._seen == self._responses:
            self._seen = self._timeouts = 0
        if answer == {"reason": "timeout"} and 0 < bound < self._timeout_s:
            return {**answer, "detail": f"no answer within {bound:g} s, after {self._full} timeouts in this step"}
        return answer
