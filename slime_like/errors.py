"""Errors for users: one sentence with problem, place and remedy. The CLI prints no traceback for them."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeVar

DONE, FAILED, REFUSED, INTERRUPTED, OUTPUT_CLOSED = 0, 1, 2, 130, 141
"""Exit codes of a command, or of a launched node."""

HEALTH_STOP = "health-stop"
"""Code of the end of a run by a rule of ``health.stop_on``. A restart would meet the same fault."""

_FIELD = re.compile(r"[a-z_]+(?:\.\w+)+|[a-z_]+(?==)")

LIKELY_KILLER = "most often the kernel's out-of-memory killer ended it (see dmesg)"
"""Likely cause if a process ended without an exception."""


class SlimeLikeError(Exception):
    """Base class of errors meant for users. ``str(error)`` is one sentence, ``who, phase: problem; remedy``.

    Attributes:
        code: stable name of the fault, for scripts and tests; the command prints it after the sentence.
        who: rank, engine, node, file or field at fault.
        phase: what was being done.
        problem: what is wrong, with the values concerned.
        remedy: what the user can do.
        users_traceback: traceback of the user's own code, if that raised; the command saves it to a file.
    """

    code = "failed"

    def __init__(
        self,
        problem: str,
        *,
        code: str | None = None,
        who: str = "",
        phase: str = "",
        remedy: str = "",
        users_traceback: str | None = None,
    ) -> None:
        super().__init__(problem)  # only the problem: pickle calls the class with it, then restores the attributes
        self.problem = problem
        self.code = code or self.code
        self.who = who
        self.phase = phase
        self.remedy = remedy
        self.users_traceback = users_traceback

    def __str__(self) -> str:
        where = ", ".join(filter(None, (self.who, self.phase)))
        return (f"{where}: " if where else "") + self.problem + (f"; {self.remedy}" if self.remedy else "")


_Raised = TypeVar("_Raised", bound=BaseException)


def with_notes(error: _Raised, original: BaseException) -> _Raised:
    """Copy the notes of ``original`` to ``error`` and return it."""
    for note in getattr(original, "__notes__", ()):
        error.add_note(note)
    return error


@dataclass(frozen=True, slots=True)
class Problem:
    """One fault of a configuration.

    Attributes:
        code: code of the check that found it, or of the kind of fault.
        text: one sentence with field, value and remedy.
        field: dotted name of the setting, if the sentence begins with one.
    """

    code: str
    text: str
    field: str = ""

    def __str__(self) -> str:
        return self.text


def field_of(sentence: str) -> str:
    """Return the field that a sentence starts with: a dotted name, or a name and its value; else an empty string."""
    found = _FIELD.match(sentence)
    return found.group() if found else ""


class ConfigError(SlimeLikeError):
    """The configuration is rejected.

    Args:
        problems: all faults found; plain sentences get ``code``, or the class's code.
    """

    code = "config"

    def __init__(self, problems: str | Iterable[Problem | str], *, code: str | None = None) -> None:
        given = [problems] if isinstance(problems, str) else problems
        self.problems = [one if isinstance(one, Problem) else Problem(code or self.code, one) for one in given]
        codes = {problem.code for problem in self.problems}
        super().__init__("\n".join(map(str, self.problems)), code=codes.pop() if len(codes) == 1 else code)


class DataError(SlimeLikeError):
    """A data file or row is unusable. The message begins with ``file:line:``, or ``file:`` for the whole file."""

    code = "data"


class CheckpointError(SlimeLikeError):
    """A checkpoint is missing, damaged, or does not fit the model."""

    code = "checkpoint"


class EngineError(SlimeLikeError):
    """A rollout engine did not start, died, or refused a request."""

    code = "engine"


class TrainerError(SlimeLikeError):
    """A trainer rank failed. The message names the rank and phase."""

    code = "trainer"


class WeightSyncError(SlimeLikeError):
    """Weights did not arrive as sent. The message names the tensor and the engine."""

    code = "weight-sync"


class RewardError(SlimeLikeError):
    """Reward workers or the advantage estimator cannot continue. A single bad answer costs only its sample."""

    code = "reward"


class EnvironmentFailure(SlimeLikeError):
    """An environment or its workers cannot continue. A single failed step costs only its conversation."""

    code = "environment"


class AgentFailure(SlimeLikeError):
    """An agent or its workers cannot continue. A single failed run costs only its rollout."""

    code = "agent"


class LaunchError(SlimeLikeError):
    """The nodes of a cluster did not come together, or one was lost. The message names it."""

    code = "launch"


class RunFinishedError(SlimeLikeError):
    """There is nothing left to do: the run has finished already."""

    code = "run-finished"


def exit_code(error: SlimeLikeError) -> int:
    """Return the command's exit code for an error: bad input is rejected, anything else is a failed run."""
    if isinstance(error, RunFinishedError):
        return DONE
    return REFUSED if isinstance(error, ConfigError | DataError) else FAILED
