"""Bounds on what hanging responses and broken reward functions cost. A single bad response costs only its sample."""

from collections import Counter
from collections.abc import Mapping, Sequence
from threading import Lock
from typing import Any

from slime_like.config import RewardConfig
from slime_like.errors import RewardError
from slime_like.sandbox.rewards.registry import QUICK, SERVICES

_SHOWN_CHARS = 60
_SUSPICIOUS_ITEMS = 8
"""Number of responses that hang, one after the other, before any other is answered."""
_SUSPICIOUS_PROMPTS = 8
"""Number of prompts in a row whose responses all failed. Prompts are counted, because all responses to one prompt fail
together if its row has an unusable answer, and a call may be about a single prompt."""
_FULL_TIMEOUTS = 8
_MAX_TIMEOUTS = 100
_SHORTENED = 0.1


def is_failure(metadata: Mapping[str, Any]) -> bool:
    """Return whether a response or rollout with this metadata has no reward, for a reason other than what it says."""
    return "reason" in metadata and "fault" not in metadata


class FailureCounter:
    """Failures over all calls of a pool, and timeouts of the present step.

    A policy may learn to write towers of powers, each of which hangs. Eight of a step's responses per worker may take
    ``timeout_s``, the next ones a tenth of it, if all functions are quick unless they hang. After 100 per worker, the
    remaining responses are not scored. The count restarts with the next step's responses.

    Args:
        responses: number of responses of a step. Each call may be about a part of a step.
    """

    def __init__(self, config: RewardConfig, responses: int) -> None:
        self._config, self._responses = config, responses
        self._functions = [function.name for function in config.computed]
        self._survives = config.max_failed_fraction == 1
        self._max = _MAX_TIMEOUTS * config.workers
        self._full = _FULL_TIMEOUTS * config.workers if QUICK.issuperset(self._functions) else self._max
        self._has_answered = False  # some item got a reward, or was to blame for having none
        self._failed = Counter[str]()
        self._lock = Lock()
        self._seen = self._timeouts = 0
        self._about: dict[str, Any] = {}

    @property
    def timeout_s(self) -> float:
        """Seconds that the next response may take; 0 if it is not to be scored."""
        if self._timeouts >= self._max:
            return 0.0
        return self._config.timeout_s * (1.0 if self._timeouts < self._full else _SHORTENED)

    @property
    def refusal(self) -> dict[str, Any]:
        """Answer for a response that is not scored."""
        detail = f"not scored: {self._timeouts} responses of this step timed out before"
        return {"reason": "budget", "detail": detail, **self._about}

    def record(self, hung: list[str | None], prompt: str, answer: dict[str, Any]) -> dict[str, Any]:
        """Count one answer and return it. A timeout after less than ``timeout_s`` gets a detail.

        ``hung`` collects the prompts of a batch's timeouts, and ``None`` for other answers. Raises ``RewardError`` if
        the first eight answers of a batch are all timeouts, unless a single prompt may be at fault, or the run is to
        survive an outage, because the functions have answered before.
        """
        bound = self.timeout_s
        self._seen += 1
        if answer.get("reason") in ("timeout", "cpu"):  # a later refusal blames what all of them had in common
            about: dict[str, Any] = {name: answer[name] for name in ("function", "fault") if name in answer}
            self._about = dict(about.items() & self._about.items()) if self._timeouts else about
            self._timeouts += 1
        if self._seen == self._responses:
            self._seen = self._timeouts = 0
        if answer.get("reason") == "timeout" and "detail" not in answer and 0 < bound < self._config.timeout_s:
            detail = f"no answer within {bound:g} s, after {self._full} timeouts in this step"
            answer = {**answer, "detail": detail}
        hung.append(prompt if is_failure(answer) and answer["reason"] == "timeout" else None)
        all_hung = len(hung) == _SUSPICIOUS_ITEMS and None not in hung
        if all_hung and not (self._has_answered and (self._survives or len(set(hung)) == 1)):
            self._reject(answer, f"failed on each of the first {_SUSPICIOUS_ITEMS} responses of a batch, most recently")
        self._has_answered |= not is_failure(answer)
        return answer

    def record_call(self, what: str, count: int, answers: Sequence[Mapping[str, Any]], last: tuple[str, str]) -> None:
        """Count one call about ``count`` "prompts" or "groups". ``last`` is its last prompt and answer.

        Raises ``RewardError`` if too many in a row failed on all responses: that is a bug, or an outage that the run is
        not to survive.
        """
        failed = bool(answers) and all(map(is_failure, answers))
        with self._lock:  # groups are scored from several threads
            self._failed[what] = in_a_row = self._failed[what] + count if failed else 0
        if in_a_row >= _SUSPICIOUS_PROMPTS and not (self._survives and self._has_answered):
            prompt, truth = (repr(text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}...") for text in last)
            where = f"most recently (prompt {prompt} and answer {truth})"
            self._reject(answers[-1], f"failed on all responses to {in_a_row} {what} in a row, {where}")

    def _reject(self, answer: Mapping[str, Any], what: str) -> None:
        name, reason = answer.get("function"), answer["reason"]
        why, remedy = answer.get("detail", "the end of its worker"), "correct the function or the answers in the data"
        if "detail" not in answer and reason == "timeout":
            why = f"no answer within reward.timeout_s={self._config.timeout_s:g} s"
            remedy = "raise that, or correct the function"
        if name in SERVICES:
            remedy = "check the service, or reward.functions"
        who = f"reward function {name}" if name else f"reward.functions ({', '.join(self._functions)})"
        problem, trace = f"{who} {what} with {why}", answer.get("traceback")
        raise RewardError(problem, code="reward-function-fails", remedy=remedy, users_traceback=trace)
