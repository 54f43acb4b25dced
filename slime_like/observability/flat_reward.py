"""Steps that teach little or nothing, while training continues: no reward differs, or most responses are cut."""

_REPORTED_AFTER = 5
"""Consecutive flat steps before the warning."""


_MOSTLY_CUT = 0.5
"""Share of responses that met their token limit from which a step is reported."""


class Truncation:
    """Warns once, after the first step most of whose responses met one of the limits that ``limits`` names."""

    def __init__(self, limits: str) -> None:
        self._limits = limits
        self._reported = False

    def add(self, step: int, share: float) -> str | None:
        """Record a step in which this share of the responses was cut off. Returns a warning where one is due."""
        if self._reported or share < _MOSTLY_CUT:
            return None
        self._reported = True
        return (
            f"step {step}: {share:.0%} of the responses were cut off, by {self._limits} or the "
            "model's length, mostly before any answer; raise the limit, or ask for shorter responses"
        )


class FlatSteps:
    """Warns once after several flat steps in a row, and once at the end of a run without any other step.

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
