"""A process that serves an engine: its messages, and both ends of its link.

``ChildProcess`` is the process as its owner sees it, ``Owner`` the owner as the process sees it. Messages are pickled.
This is safe because both processes run this package, and nothing else can reach the socket pair: it has no address.
"""

import asyncio
import itertools
import os
import queue
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NoReturn

from slime_like import errors
from slime_like.errors import ConfigError, EngineError, SlimeLikeError
from slime_like.hosting.faults import one_line
from slime_like.interfaces import Generation, GenerationRequest
from slime_like.system.processes import descendants, end_processes


@dataclass(frozen=True, slots=True)
class MethodCall:
    """Call of a method on the served object. The answer repeats ``number``."""

    number: int
    method: str
    arguments: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class MethodAnswer:
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
            self._link.send(MethodCall(number, method, arguments))
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
                self._link.send(MethodCall(next(self._numbers), "abort", (request.request_id,)))
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

    def _answered(self, answer: MethodAnswer) -> None:
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


class Owner:
    """Owner of this process. It receives from construction on, so its end is noticed even while the engine starts.

    The directory ``scratch`` is removed when this process ends.
    """

    def __init__(self, connection: Connection, scratch: Path) -> None:
        self._calls: queue.SimpleQueue[MethodCall] = queue.SimpleQueue()
        self._deliver: Callable[[MethodCall], object] = self._calls.put
        self._scratch = scratch
        self._ending = threading.Lock()
        self._files: list[Path] = []
        self._link = Link(connection, lambda call: self._deliver(call), self.end)

    @contextmanager
    def starting(self) -> Iterator[tuple[Any, ...]]:
        """Wait for the first call and yield its arguments; start what it asks for inside.

        The call is answered on exit. An error inside becomes the answer and ends this process.
        """
        call = self._calls.get()
        try:
            yield call.arguments
        except BaseException as error:
            self._answer(MethodAnswer(call.number, error=portable(error)))
            self.end()
        self._answer(MethodAnswer(call.number))

    async def serve(self, host: object) -> None:
        """Answer calls with the methods of ``host`` until the owner ends."""
        loop = asyncio.get_running_loop()
        tasks: set[asyncio.Task[None]] = set()

        def begin(call: MethodCall) -> None:
            task = loop.create_task(self._serve_call(host, call))
            tasks.add(task)
            task.add_done_callback(tasks.discard)

        self._deliver = lambda call: loop.call_soon_threadsafe(begin, call)
        while not self._calls.empty():
            begin(self._calls.get())
        await asyncio.Event().wait()

    def end_with(self, processes: Sequence[BaseProcess]) -> None:
        """End this process as soon as one of ``processes`` ends.

        The files they share are open by now and no longer need names. Unlinking them here means nothing is left behind.
        """
        self._remove_files()

        def watch() -> None:
            wait([process.sentinel for process in processes])
            self.end()

        threading.Thread(target=watch, name="watch-schedulers", daemon=True).start()

    def end(self) -> NoReturn:
        """End all children by process id, remove their files, and end this process. Callable from any thread."""
        self._ending.acquire()  # never released: a second caller must not end the process halfway through
        end_processes(descendants(os.getpid()), grace_s=0.0)
        self._remove_files()
        shutil.rmtree(self._scratch, ignore_errors=True)
        os._exit(1)  # an exception here would not end the main thread, which may be inside native code

    def will_remove(self, path: Path) -> None:
        """Remember to remove a file that children create outside ``scratch``."""
        self._files.append(path)

    def _remove_files(self) -> None:
        for path in self._files:
            path.unlink(missing_ok=True)

    async def _serve_call(self, host: object, call: MethodCall) -> None:
        try:
            value = await getattr(host, call.method)(*call.arguments)
        except Exception as error:
            self._answer(MethodAnswer(call.number, error=portable(error)))
        else:
            self._answer(MethodAnswer(call.number, value))

    def _answer(self, answer: MethodAnswer) -> None:
        with suppress(OSError):  # the owner has ended, and this process will too
            self._link.send(answer)
