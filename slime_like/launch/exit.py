"""How a node ends: its exit code, and the sentence that every node prints."""

from __future__ import annotations

from slime_like.errors import ConfigError, SlimeLikeError, exit_code
from slime_like.launch.messages import Verdict


def sentence(error: SlimeLikeError) -> str:
    """All it has to say, in one line."""
    return "; ".join(error.problems) if isinstance(error, ConfigError) else str(error)


def failure(error: SlimeLikeError, who: str = "") -> Verdict:
    """The verdict of a run that ``error`` has ended, on node ``who`` if that is not said yet."""
    return Verdict(exit_code(error), f"{who}: {sentence(error)}" if who else sentence(error))
