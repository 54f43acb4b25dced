"""Responses without a reward, because a function or the environment failed, and notes about them."""

from collections.abc import Mapping, Sequence
from typing import Any

from slime_like.orchestration.rollout.scoring import by_reason, failure_text
from slime_like.system.words import counted

_GROWTH = 2
"""Growth of the failed share over the largest reported share at which a step is reported again."""


class ScoringFailures:
    """Counter of failures that reports only some steps, since an unreliable function fails in every step.

    It reports the first, second, fourth, eighth and so on of the steps with failures. It also reports steps with a new
    kind of failure, or with at least twice the largest share reported so far.
    """

    def __init__(self) -> None:
        self._reasons: list[str] = []
        self._kinds = set[tuple[str, ...]]()
        self._failed_steps = 0
        self._largest_share = 0.0
        self._responses = 0

    def add(self, step: int, metadata: Sequence[Mapping[str, Any]]) -> str | None:
        """Record a step with the metadata of all its responses. Return a note if one is due."""
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
        """Return a note about all recorded steps if any had a failure."""
        if not self._reasons:
            return None
        share = f"{len(self._reasons)} of {counted(self._responses, 'response')}"
        return f"all steps: scoring failed for {share} ({by_reason(self._reasons)}); they got reward 0"


def _kind(failure: Mapping[str, Any]) -> tuple[str, ...]:
    """Return reason, function and, for errors, the exception's name, which the detail starts with."""
    reason = failure["reason"]
    error = str(failure.get("detail", "")).partition(":")[0] if reason == "error" else ""
    return reason, str(failure.get("function", "")), error
