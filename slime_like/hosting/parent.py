"""The process that started this one, as seen from here: calls come in, answers go out, and both end together."""

import asyncio
import os
import queue
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NoReturn

from slime_like.hosting.calls import Answer, Call, Link, portable
from slime_like.system.processes import descendants, end_processes


class Owner:
    """Owner of this process. It receives from construction on, so its end is noticed even while the engine starts.

    The directory ``scratch`` is removed when this process ends.
    """

    def __init__(self, connection: Connection, scratch: Path) -> None:
        self._calls: queue.SimpleQueue[Call] = queue.SimpleQueue()
        self._deliver: Callable[[Call], object] = self._calls.put
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
            self._answer(Answer(call.number, error=portable(error)))
            self.end()
        self._answer(Answer(call.number))

    async def serve(self, host: object) -> None:
        """Answer calls with the methods of ``host`` until the owner ends."""
        loop = asyncio.get_running_loop()
        tasks: set[asyncio.Task[None]] = set()

        def begin(call: Call) -> None:
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

    async def _serve_call(self, host: object, call: Call) -> None:
        try:
            value = await getattr(host, call.method)(*call.arguments)
        except Exception as error:
            self._answer(Answer(call.number, error=portable(error)))
        else:
            self._answer(Answer(call.number, value))

    def _answer(self, answer: Answer) -> None:
        with suppress(OSError):  # the owner has ended, and this process will too
            self._link.send(answer)
