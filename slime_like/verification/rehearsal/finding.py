"""A line of a rehearsal's table."""

from dataclasses import dataclass
from typing import Literal

from slime_like.errors import ConfigError, SlimeLikeError


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the table: ``stage`` is what was tried."""

    kind: Literal["ok", "FOUND", "note"]
    stage: str
    text: str


def listed(error: SlimeLikeError) -> str:
    """All problems of an error, each with its code."""
    problems = error.problems if isinstance(error, ConfigError) else [error]
    return "; ".join(f"{problem} [{problem.code}]" for problem in problems)
