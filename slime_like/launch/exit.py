"""Exit of a node: its exit code, and the sentence that every node prints."""

from __future__ import annotations

from dataclasses import dataclass

from slime_like.errors import ConfigError, LaunchError, SlimeLikeError, exit_code


@dataclass(frozen=True, slots=True)
class Verdict:
    """End of the run on all nodes.

    Attributes:
        code: exit code of every node.
        sentence: the cause, where the code is not 0.
    """

    code: int
    sentence: str = ""


class NodeEndedError(LaunchError):
    """Another node has ended the run; this one ends with the same ``verdict``."""

    def __init__(self, verdict: Verdict) -> None:
        self.verdict = verdict
        super().__init__(verdict.sentence)


class RefusedError(LaunchError):
    """This node is not part of the run, which goes on without it."""


def failure(error: SlimeLikeError, who: str = "") -> Verdict:
    """Verdict of a run that ``error`` has ended, on node ``who`` if the error does not name it."""
    if isinstance(error, NodeEndedError):
        return error.verdict
    sentence = "; ".join(error.problems) if isinstance(error, ConfigError) else str(error)
    return Verdict(exit_code(error), f"{who}: {sentence}" if who else sentence)
