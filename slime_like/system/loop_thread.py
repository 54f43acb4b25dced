"""An event loop in a thread, for code that is not asynchronous."""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any, TypeVar

_THREADS = 32
_END_TIMEOUT_S = 60.0

Result = TypeVar("Result")


class LoopThread:
    """Thread that runs coroutines for any thread. Processes that they start live as long as this thread."""

    def __init__(self) -> None:
        self._runner = asyncio.Runner(loop_factory=asyncio.new_event_loop)
        self.loop = self._runner.get_loop()
        self.loop.set_default_executor(ThreadPoolExecutor(_THREADS))
        self._calls: list[Callable[[], object]] = []
        self._lock = threading.Lock()  # guards the calls
        self._stopping = asyncio.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def start(self, coroutine: Coroutine[Any, Any, Result]) -> Future[Result]:
        """Run the coroutine in the background."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop)

    def call_soon(self, function: Callable[[], object]) -> None:
        """Call a function in the loop, from any thread. Calls that come before the loop runs share one wake-up."""
        with self._lock:
            self._calls.append(function)
            if len(self._calls) > 1:
                return
        with suppress(RuntimeError):  # the loop is closed
            self.loop.call_soon_threadsafe(self._call_all)

    def _call_all(self) -> None:
        with self._lock:
            calls, self._calls = self._calls, []
        for function in calls:
            function()

    def run(self, coroutine: Coroutine[Any, Any, Result], timeout_s: float | None = None) -> Result:
        """Wait for the coroutine's result. A wait that is interrupted, or takes longer, cancels it."""
        future = self.start(coroutine)
        try:
            return future.result(timeout_s)
        finally:
            future.cancel()

    def close(self) -> None:
        """Cancel running coroutines and end the thread, within a bound. May be called twice."""
        if not self.loop.is_closed():
            self.loop.call_soon_threadsafe(self._stopping.set)
        self._thread.join(_END_TIMEOUT_S)

    def _serve(self) -> None:
        with self._runner:
            self._runner.run(self._stopping.wait())
