"""Messages between an engine's owner and the engine's process."""

from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from slime_like import errors
from slime_like.errors import ConfigError, EngineError, SlimeLikeError


@dataclass(frozen=True, slots=True)
class Call:
    """Run a method of what the process serves; ``number`` comes back with the answer."""

    number: int
    method: str
    arguments: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Answer:
    """A call's result, or its failure."""

    number: int
    value: Any = None
    error: SlimeLikeError | None = None


def portable(error: BaseException) -> SlimeLikeError:
    """The error with all its fields as any process can unpickle it: of a class of this package."""
    if not isinstance(error, SlimeLikeError):
        return EngineError(one_line(error), code="unexpected")
    known = getattr(errors, type(error).__name__, None) is type(error) and not isinstance(error, ConfigError)
    kind = type(error) if known else EngineError
    return kind(
        error.problem,
        code=error.code,
        who=error.who,
        phase=error.phase,
        remedy=error.remedy,
        users_traceback=error.users_traceback,
    )


def one_line(error: BaseException) -> str:
    """The error on one line, with its type unless it is this distribution's."""
    text = str(error) if isinstance(error, SlimeLikeError) else f"{type(error).__name__}: {_error_text(error)}"
    return " ".join(text.split())[:500]


def code_of(error: BaseException, other: str) -> str:
    """The error's code; ``other`` for errors that are not this distribution's."""
    return error.code if isinstance(error, SlimeLikeError) else other


def _error_text(error: BaseException) -> str:
    """The text of an error; of pydantic's without the count and the addresses."""
    if not isinstance(error, ValidationError):
        return str(error)
    details = error.errors(include_url=False, include_context=False, include_input=False)
    places = (".".join(map(str, detail["loc"])) for detail in details)
    return "; ".join(
        f"{place}: {detail['msg']}" if place else detail["msg"] for place, detail in zip(places, details, strict=True)
    )
