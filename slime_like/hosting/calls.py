"""Messages between an engine's owner and the process it has started, and the socket pair that carries them.

Both processes run this package and one has started the other, so that messages are pickled: nothing else can reach the
pair, which has no address.
"""

import os
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
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


class Link:
    """One end. A separate thread receives, so that the other side's end is noticed whatever this process does."""

    def __init__(
        self, connection: Connection, on_message: Callable[[Any], object], on_close: Callable[[], object]
    ) -> None:
        self._connection = connection
        self._on_message = on_message
        self._on_close = on_close
        threading.Thread(target=self._receive, name="engine-link", daemon=True).start()

    def send(self, message: Any) -> None:
        """Raises ``OSError`` if the other side has ended."""
        self._connection.send(message)

    def close(self) -> None:
        """Hang up: both sides' ``on_close`` are called."""
        with suppress(OSError), socket.socket(fileno=os.dup(self._connection.fileno())) as pair:
            pair.shutdown(socket.SHUT_RDWR)  # closing the descriptor would not wake the thread that reads from it

    def _receive(self) -> None:
        while True:
            try:
                message = self._connection.recv()
            except (EOFError, OSError):
                self._connection.close()
                self._on_close()
                return
            self._on_message(message)


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
