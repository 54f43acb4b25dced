"""A serving process as its owner sees it: started, called, watched, and ended by process id."""

import asyncio
import itertools
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

from slime_like.hosting.calls import Answer, Call, Link
from slime_like.interfaces import Generation, GenerationRequest
from slime_like.system.processes import descendants, end_processes


class ProcessEnded(Exception):
    """The process ended before it answered."""


class ChildProcess:
    """One process and its children. Belongs to one event loop.

    ``python -m module`` gets a descriptor and a scratch directory, for an ``Owner``. ``environment`` is a function from
    that directory to the process's environment.
    """

    def __init__(self, module: str, environment: Callable[[Path], Mapping[str, str]]) -> None:
        self._loop = asyncio.get_running_loop()
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self.alive = True
        self._scratch = Path(tempfile.mkdtemp(prefix="slime-like-engine-"))
        ours, theirs = Pipe()
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, str(theirs.fileno()), str(self._scratch)],
            stdin=subprocess.DEVNULL,
            pass_fds=(theirs.fileno(),),
            env=environment(self._scratch),
            start_new_session=True,  # the owner handles Ctrl-C on the terminal
        )
        theirs.close()
        self.process_ids: tuple[int, ...] = (self._process.pid,)
        self._link = Link(ours, self._in_loop(self._answered), self._in_loop(self._closed))

    async def start(self, *what: Any) -> None:
        """Tell the process what to serve, and wait until it is ready. Raises like ``call``."""
        await self.call("start", *what)
        self.note_processes()

    async def call(self, method: str, *arguments: Any) -> Any:
        """Call the method in the process and return its result.

        Raises:
            SlimeLikeError: the method failed; class and fields are the original error's.
            ProcessEnded: the process has ended.
        """
        if not self.alive:
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

    async def generate(self, request: GenerationRequest) -> list[Generation]:
        """Call ``generate``. If the caller gives up, the process aborts the request. Raises like ``call``."""
        try:
            samples: list[Generation] = await self.call("generate", request)
            return samples
        except asyncio.CancelledError:
            with suppress(OSError):  # the process has just ended
                self._link.send(Call(next(self._numbers), "abort", (request.request_id,)))
            raise

    def note_processes(self) -> None:
        """Record the process's children while they can still be found."""
        self.process_ids = tuple(dict.fromkeys((*self.process_ids, *descendants(self._process.pid))))

    def end(self, grace_s: float) -> None:
        """Hang up, which ends the process and its children. After ``grace_s``, kill what is left by id. Blocks."""
        self.note_processes()
        self.alive = False
        self._link.close()
        try:
            self._process.wait(grace_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        end_processes(self.process_ids, grace_s=0.0)
        shutil.rmtree(self._scratch, ignore_errors=True)

    def _in_loop(self, handler: Callable[..., None]) -> Callable[..., None]:
        """Wrap ``handler`` so that the link's thread runs it in the event loop."""

        def deliver(*arguments: Any) -> None:
            if not self._loop.is_closed():
                self._loop.call_soon_threadsafe(handler, *arguments)

        return deliver

    def _answered(self, answer: Answer) -> None:
        future = self._waiting.get(answer.number)
        if future is None or future.done():  # the caller has given up
            return
        if answer.error is None:
            future.set_result(answer.value)
        else:
            future.set_exception(answer.error)

    def _closed(self) -> None:
        self.alive = False
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(ProcessEnded())
