"""Steps in which no reward differed from those of its group: training continues, and learns nothing."""

_REPORTED_AFTER = 5
"""Consecutive flat steps before the warning."""


class FlatSteps:
    """Warns once after several flat steps in succession, and once at the end of a run without any other step.

    Args:
        tables: path of the tables of samples and rewards; ``None`` where none are written.
    """

    def __init__(self, tables: str | None) -> None:
        look = f"; {tables} shows what the model writes and what reward it gets" if tables else ""
        self._remedy = f"take prompts that are sometimes solved and sometimes not, or more samples of each{look}"
        self._flat: list[bool] = []
        self._reported = False

    def add(self, step: int, flat: bool) -> str | None:
        """Record a step; ``flat`` means that every advantage was 0. Returns a warning where one is due."""
        self._flat.append(flat)
        if self._reported or len(self._flat) < _REPORTED_AFTER or not all(self._flat[-_REPORTED_AFTER:]):
            return None
        self._reported = True
        return self._sentence(f"steps {step - _REPORTED_AFTER + 1} to {step}")

    def at_end(self) -> str | None:
        """Return a warning if the whole run was flat."""
        if not self._flat or not all(self._flat):
            return None
        return self._sentence("all steps of this run" if len(self._flat) > 1 else "the only step of this run")

    def _sentence(self, when: str) -> str:
        return (
            f"{when}: the responses to each prompt all got the same reward, so that every advantage was 0 and rewards "
            f"taught nothing; {self._remedy}"
        )
