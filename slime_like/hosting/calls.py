"""Messages between an engine's owner and the process it started, the socket pair that carries them, and errors.

Messages are pickled. This is safe because both processes run this package, and nothing else can reach the socket pair:
it has no address.
"""

import os
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from slime_like import errors
from slime_like.errors import LIKELY_KILLER, ConfigError, EngineError, SlimeLikeError


@dataclass(frozen=True, slots=True)
class Call:
    """Call of a method on the served object. The answer repeats ``number``."""

    number: int
    method: str
    arguments: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Answer:
    """Result or failure of a call."""

    number: int
    value: Any = None
    error: SlimeLikeError | None = None


class Link:
    """One end of the socket pair. A separate thread receives, so this end always notices when the other side ends."""

    def __init__(
        self, connection: Connection, on_message: Callable[[Any], object], on_close: Callable[[], object]
    ) -> None:
        self._connection = connection
        self._on_message = on_message
        self._on_close = on_close
        threading.Thread(target=self._receive, name="engine-link", daemon=True).start()

    def send(self, message: Any) -> None:
        """Send a message. Raises ``OSError`` if the other side has ended."""
        self._connection.send(message)

    def close(self) -> None:
        """Hang up, which calls ``on_close`` on both sides."""
        with suppress(OSError), socket.socket(fileno=os.dup(self._connection.fileno())) as pair:
            pair.shutdown(socket.SHUT_RDWR)  # closing the descriptor would not wake the reading thread

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
    """Convert an error, with all its fields, to a class of this package, which any process can unpickle."""
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
    """Format the error on one line, with its type unless it is from this package, without pydantic's count and URLs."""
    text = str(error)
    if isinstance(error, ValidationError):
        details = error.errors(include_url=False, include_context=False, include_input=False)
        pairs = ((".".join(map(str, detail["loc"])), detail["msg"]) for detail in details)
        text = "; ".join(f"{place}: {problem}" if place else problem for place, problem in pairs)
    kind = "" if isinstance(error, SlimeLikeError) else f"{type(error).__name__}: "
    return " ".join(f"{kind}{text}".split())[:500]


def code_of(error: BaseException, other: str) -> str:
    """Return the error's code, or ``other`` for errors from outside this package."""
    return error.code if isinstance(error, SlimeLikeError) else other


@dataclass(frozen=True, slots=True)
class EngineFaults:
    """Errors of the engine ``name``. Its log is in ``run_dir``."""

    name: str
    run_dir: Path

    @property
    def log(self) -> str:
        return f"its log is in {self.run_dir}/worker_logs"

    def start_timeout(self, timeout_s: float) -> EngineError:
        problem = f"{self.name} did not start within rollout.start_timeout_s={timeout_s:g} s"
        return EngineError(problem, code="engine-start-timeout")

    def start_failed(self, reason: str, remedy: str = "") -> EngineError:
        return EngineError(f"{self.name} did not start: {reason}", code="engine-start-failed", remedy=remedy)

    def not_running(self) -> EngineError:
        return EngineError(f"{self.name} is not running", code="engine-not-running", remedy="call start first")

    def died(self, when: str = "") -> EngineError:
        """Build the error of a dead process. ``when`` says when it died, if known ("during resume")."""
        problem, who = (f"{self.name} died {when}", "") if when else ("its process has died", self.name)
        return EngineError(problem, code="engine-died", who=who, remedy=f"{LIKELY_KILLER}, and {self.log}")
