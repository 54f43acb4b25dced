"""Steps that teach little or nothing, while training continues: no reward differs, or most responses are cut."""

_REPORTED_AFTER = 5
"""Consecutive flat steps before the warning."""


_MOSTLY_CUT = 0.5
"""Share of responses that met their limit from which a step is reported."""


class Truncation:
    """Warns once, after the first step most of whose responses met one of the limits that ``limits`` names.

    Args:
        what: happened to them.
        remedy: what helps.
    """

    def __init__(self, what: str, limits: str, remedy: str) -> None:
        self._what, self._limits, self._remedy = what, limits, remedy
        self._reported = False

    def add(self, step: int, share: float) -> str | None:
        """Record a step in which this happened to this share of the responses. Returns a warning where one is due."""
        if self._reported or share < _MOSTLY_CUT:
            return None
        self._reported = True
        return f"step {step}: {share:.0%} of the responses {self._what} (limits: {self._limits}), {self._remedy}"


class FlatSteps:
    """Warns once after several flat steps in a row, and once at the end of a run without any other step.

    Args:
        tables: path of the tables of samples and rewards; ``None`` where none are written.
    """

    def __init__(self, tables: str | None) -> None:
        look = f"; responses and rewards are in {tables}" if tables else ""
        self._remedy = f"use prompts that are solved sometimes, or more samples of each prompt{look}"
        self._steps: list[int] = []
        self._flat: list[bool] = []
        self._reported = False

    def add(self, step: int, flat: bool) -> str | None:
        """Record a step; ``flat`` means that every advantage was 0. Returns a warning where one is due."""
        self._steps.append(step)
        self._flat.append(flat)
        if self._reported or len(self._flat) < _REPORTED_AFTER or not all(self._flat[-_REPORTED_AFTER:]):
            return None
        self._reported = True
        return self._sentence(f"steps {step - _REPORTED_AFTER + 1} to {step}")

    def at_end(self) -> str | None:
        """Return a warning if all recorded steps were flat."""
        if not self._flat or not all(self._flat):
            return None
        first, last = self._steps[0], self._steps[-1]
        return self._sentence(f"all steps from {first} to {last}" if first < last else f"step {first}")

    def _sentence(self, when: str) -> str:
        return (
            f"{when}: the responses to each prompt all got the same reward, so that all advantages and the policy "
            f"gradient were 0; {self._remedy}"
        )
