"""Errors for users: one sentence with the problem, the place and the remedy. The CLI prints no traceback for them."""

from typing import Any

FAILED, REFUSED, INTERRUPTED = 1, 2, 130
"""Exit codes of a command, or a node of a launch, that did not succeed."""


class SlimeLikeError(Exception):
    """Base of every error whose message alone tells a user what to do.

    Attributes:
        users_traceback: of the user's own code, where that is what raised; the command keeps it in a file.
    """

    users_traceback: str | None = None


class ConfigError(SlimeLikeError):
    """The configuration is rejected.

    Attributes:
        problems: every fault found, each with field, value and remedy.
        rest: the configuration with defaults for the fields that are wrong, where that makes one: for further
            checks.
    """

    def __init__(self, problems: list[str], rest: Any = None) -> None:
        self.problems = list(problems)
        self.rest = rest
        super().__init__("\n".join(self.problems))


class DataError(SlimeLikeError):
    """A data file or row is unusable; the message begins with ``file:line:``, or ``file:`` where it is
    about the whole of it."""


class CheckpointError(SlimeLikeError):
    """A checkpoint is missing, damaged, or does not fit the model."""


class EngineError(SlimeLikeError):
    """A rollout engine did not start, died, or refused a request."""


class TrainerError(SlimeLikeError):
    """A trainer rank failed: the message names rank and phase."""


class WeightSyncError(SlimeLikeError):
    """Weights did not arrive as sent; the message names the tensor and the engine."""


class RewardError(SlimeLikeError):
    """Reward workers or the advantage estimator cannot go on (one bad answer costs only its own sample: no error)."""


class EnvironmentFailure(SlimeLikeError):
    """An environment or its workers cannot go on (one failed step costs only its own conversation: no error)."""


class LaunchError(SlimeLikeError):
    """The nodes of a cluster did not come together, or one of them was lost; the message names it."""


def exit_code(error: SlimeLikeError) -> int:
    """Return the command's exit code for an error."""
    return REFUSED if isinstance(error, ConfigError) else FAILED
