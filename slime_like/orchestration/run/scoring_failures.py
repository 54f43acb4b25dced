"""Responses of training steps that got no reward because a function or the environment failed, and their notes."""

from collections.abc import Mapping, Sequence
from typing import Any

from slime_like.orchestration.rollout.failures import by_reason, failure_text
from slime_like.system.words import counted

_GROWTH = 2
"""Share of failures that is reported again, in terms of the largest one reported."""


class ScoringFailures:
    """Counts failures, and reports some steps: a function that fails now and then does so in every step.

    Reported are the first, second, fourth, eighth and so on of the steps with failures, those with a kind of failure
    not seen before, and those whose share of failures is at least twice the largest one reported.
    """

    def __init__(self) -> None:
        self._reasons: list[str] = []
        self._kinds = set[tuple[str, ...]]()
        self._failed_steps = 0
        self._largest_share = 0.0
        self._responses = 0

    def add(self, step: int, metadata: Sequence[Mapping[str, Any]]) -> str | None:
        """Record a step with the metadata of all of its responses. Returns a note where one is due."""
        failed = [entry for entry in metadata if "reason" in entry]
        self._responses += len(metadata)
        if not failed:
            return None
        self._reasons += [entry["reason"] for entry in failed]
        self._failed_steps += 1
        failed.sort(key=lambda entry: _kind(entry) in self._kinds)  # the note quotes the first one
        new = {_kind(entry) for entry in failed} - self._kinds
        self._kinds |= new
        share = len(failed) / len(metadata)
        is_power_of_two = self._failed_steps & (self._failed_steps - 1) == 0
        if not (is_power_of_two or new or share >= _GROWTH * self._largest_share):
            return None
        self._largest_share = max(share, self._largest_share)
        return (
            f"step {step}, reward: scoring failed for {len(failed)} of {counted(len(metadata), 'response')} "
            f"({failure_text(failed)}); they got reward 0"
        )

    def at_end(self) -> str | None:
        """Return a note about all recorded steps, where one of them had a failure."""
        if not self._reasons:
            return None
        share = f"{len(self._reasons)} of {counted(self._responses, 'response')}"
        return f"all steps: scoring failed for {share} ({by_reason(self._reasons)}); they got reward 0"


def _kind(failure: Mapping[str, Any]) -> tuple[str, ...]:
    """The reason, the function, and of an error the exception's name, with which its detail begins."""
    reason = failure["reason"]
    error = str(failure.get("detail", "")).partition(":")[0] if reason == "error" else ""
    return reason, str(failure.get("function", "")), error
