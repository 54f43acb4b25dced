"""SGLang's process, as seen from its owner: started, called, watched, and ended by id."""

from __future__ import annotations

import asyncio
import itertools
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollout.processes import descendants, end_processes
from rollout.sglang.arguments import environment
from rollout.sglang.calls import START, Answer, Call
from rollout.sglang.link import Link
from slime_like.errors import EngineError

if TYPE_CHECKING:
    from slime_like.config import RunConfig

_MODULE = "rollout.sglang.main"


class ProcessEnded(Exception):
    """SGLang's process ended before it answered."""


class EngineProcess:
    """One of SGLang's, with its schedulers. Belongs to one event loop."""

    def __init__(self, config: RunConfig, engine_index: int) -> None:
        self._config = config
        self._index = engine_index
        self._loop = asyncio.get_running_loop()
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._ended = False
        self._scratch = Path(tempfile.mkdtemp(prefix="slime-like-sglang-"))
        ours, theirs = Pipe()
        self._process = self._launch(theirs)
        theirs.close()
        self.process_ids: tuple[int, ...] = (self._process.pid,)
        self._link = Link(ours, self._in_loop(self._answered), self._in_loop(self._closed))

    @property
    def alive(self) -> bool:
        return not self._ended

    async def start(self) -> None:
        """Wait until it serves; raises as ``call``."""
        await self.call(START, self._config, self._index)
        self.note_processes()

    async def call(self, method: str, *arguments: Any) -> Any:
        """What ``Host.method(*arguments)`` returns.

        Raises:
            EngineError: the method failed; the message is its own.
            ProcessEnded: the process is gone.
        """
        if self._ended:
            raise ProcessEnded
        number = next(self._numbers)
        answer = self._waiting[number] = self._loop.create_future()
        try:
            self._link.send(Call(number, method, arguments))
            return await answer
        except OSError as error:
            raise ProcessEnded from error
        finally:
            del self._waiting[number]

    def tell(self, method: str, *arguments: Any) -> None:
        """Call without waiting for the answer."""
        with suppress(OSError):  # it has just ended
            self._link.send(Call(next(self._numbers), method, arguments))

    def note_processes(self) -> None:
        """Remember who belongs to it, while that can be asked."""
        self.process_ids = tuple(dict.fromkeys((*self.process_ids, *descendants(self._process.pid))))

    def end(self, grace_s: float) -> None:
        """Hang up, at which it ends with all it has, and end by id what is left after ``grace_s``. Blocks."""
        self.note_processes()
        self._ended = True
        self._link.close()
        try:
            self._process.wait(grace_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        end_processes(self.process_ids, grace_s=0.0)
        shutil.rmtree(self._scratch, ignore_errors=True)

    def _launch(self, theirs: Connection) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", _MODULE, str(theirs.fileno()), str(self._scratch)]
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            pass_fds=(theirs.fileno(),),
            env=environment(self._config, self._scratch),
            start_new_session=True,  # Ctrl-C on the terminal is the owner's business
        )

    def _in_loop(self, handler: Callable[..., None]) -> Callable[..., None]:
        """``handler``, called in the event loop from the link's thread."""

        def deliver(*arguments: Any) -> None:
            if not self._loop.is_closed():
                self._loop.call_soon_threadsafe(handler, *arguments)

        return deliver

    def _answered(self, answer: Answer) -> None:
        future = self._waiting.get(answer.number)
        if future is None or future.done():  # its caller has given up
            return
        if answer.error is None:
            future.set_result(answer.value)
        else:
            future.set_exception(EngineError(answer.error))

    def _closed(self) -> None:
        self._ended = True
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(ProcessEnded())
