"""Bound on the time that hanging responses cost a step."""

from typing import Any

_FULL_TIMEOUTS = 8
_MAX_TIMEOUTS = 100
_SHORTENED = 0.1


class TimeBudget:
    """Counter of a step's timeouts. A policy may learn to write towers of powers, each of which hangs.

    Eight of a step's responses per worker may take ``timeout_s``, the next ones a tenth of it. After 100 per worker,
    the remaining responses are not scored. The count restarts with the next step's responses.

    Args:
        timeout_s: seconds that one response may take.
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
