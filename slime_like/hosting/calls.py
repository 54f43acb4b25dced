"""Messages between an engine's owner and the engine's process."""

from dataclasses import dataclass
from typing import Any

from slime_like.errors import SlimeLikeError

START = "start"
"""The first call, answered when the process serves; its arguments say what."""


@dataclass(frozen=True, slots=True)
class Call:
    """Run a method of what the process serves; ``number`` comes back with the answer."""

    number: int
    method: str
    arguments: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Answer:
    """A call's result, or its failure: one line, and the name of the error's class."""

    number: int
    value: Any = None
    error: str | None = None
    kind: str = ""


def one_line(error: BaseException) -> str:
    """Type and message of an error; of our own errors, which say everything, the message alone."""
    text = str(error) if isinstance(error, SlimeLikeError) else f"{type(error).__name__}: {error}"
    return " ".join(text.split())[:500]
