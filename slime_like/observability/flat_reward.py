"""Steps in which no reward differed from those of its group: training goes on, and learns nothing."""

from __future__ import annotations

_TELLING = 5
"""So many steps in succession are no accident any more."""

_REMEDY = "take prompts that are sometimes solved and sometimes not, or more samples of each"


class FlatSteps:
    """Says so in one sentence, once where it lasts, and once at the end of a run that had no other step.

    Args:
        tables: where samples with their rewards are to be seen; none where no tables are written.
    """

    def __init__(self, tables: str | None) -> None:
        look = f"; {tables} shows what the model writes and what reward it gets" if tables else ""
        self._remedy = f"{_REMEDY}{look}"
        self._steps = 0
        self._flat_steps = 0
        self._in_succession = 0
        self._told = False

    def add(self, step: int, flat: bool) -> str | None:
        """One more step, in which every advantage was 0, or not; what is to be said now, if anything."""
        self._steps += 1
        self._flat_steps += flat
        self._in_succession = self._in_succession + 1 if flat else 0
        if self._told or self._in_succession < _TELLING:
            return None
        self._told = True
        return self._sentence(f"steps {step - _TELLING + 1} to {step}")

    def at_end(self) -> str | None:
        """What is to be said of the whole run."""
        if not self._steps or self._flat_steps < self._steps:
            return None
        return self._sentence("all steps of this run" if self._steps > 1 else "the only step of this run")

    def _sentence(self, when: str) -> str:
        return (
            f"{when}: the responses to each prompt all got the same reward, so that every advantage was 0 and rewards "
            f"taught nothing; {self._remedy}"
        )
