"""The decode thread: admits requests, steps batches, pauses between two tokens.

Other threads only put commands into an inbox; the decode thread carries them out between two steps. So no lock is held
while a model runs, and every command takes effect at a token boundary.
"""

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field
from typing import Any

from rollout.transformers.decoding import DecodeBatch
from rollout.transformers.samples import Sample
from slime_like.errors import EngineError
from slime_like.interfaces import Generation, PauseMode

_BURST_GAP_S, _BURST_S = 0.002, 0.02
"""What an idle thread waits for another request, and for all of them: less than a step."""


@dataclass(slots=True, eq=False)
class _PendingRequest:
    """One request inside the thread; ``result`` is set when all of its samples have ended."""

    request_id: str
    samples: list[Sample]
    result: Future[list[Generation]] = field(default_factory=Future)

    @property
    def is_done(self) -> bool:
        return all(sample.finish_reason is not None for sample in self.samples)

    def end(self) -> None:
        for sample in self.samples:
            if sample.finish_reason is None:
                sample.finish_reason = "abort"


class _Inbox(queue.SimpleQueue[Callable[[], None]]):
    """Commands of other threads, carried out by the thread that calls every method but ``put``."""

    def await_burst(self) -> None:
        """Requests come in bursts: those that begin together are prefilled together, and are never a step apart."""
        deadline = time.monotonic() + _BURST_S
        with contextlib.suppress(queue.Empty):
            while time.monotonic() < deadline:
                self.get(timeout=_BURST_GAP_S)()

    def drain(self) -> None:
        while not self.empty():
            self.get()()


class DecodeScheduler:
    """Owns the thread. Public methods may be called from any thread and never wait for a step."""

    def __init__(self, model: Any, max_batch_size: int) -> None:
        self._max_batch_size = max_batch_size
        self._inbox = _Inbox()
        self._error: EngineError | None = None
        # Below: touched by the decode thread alone.
        self._version = 0
        self._waiting: list[_PendingRequest] = []
        self._running: list[_PendingRequest] = []
        self._batch = DecodeBatch(model)
        self._pause_mode: PauseMode | None = None
        self._pause_waiters: list[Future[None]] = []
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="decode", daemon=True)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive() and self._error is None

    def submit(self, request_id: str, samples: list[Sample]) -> Future[list[Generation]]:
        request = _PendingRequest(request_id, samples)
        self._put(lambda: self._waiting.append(request), request.result)
        return request.result

    def abort(self, request_id: str | None) -> None:
        """End one request, or all; what it has sampled is its result."""
        self._put(lambda: self._end(request_id))

    def pause(self, mode: PauseMode) -> Future[None]:
        """Done when no token is being sampled, and in mode "wait" when nothing runs any more."""
        done: Future[None] = Future()
        self._put(lambda: self._pause(mode, done), done)
        return done

    def resume(self) -> None:
        self._put(self._resume)

    def set_version(self, version: int) -> None:
        """New weights are in the model: frozen requests start again from their tokens. Call while paused."""
        self._put(lambda: self._set_version(version))

    def stop(self, timeout_s: float) -> bool:
        """Ends the thread; False if it has not ended in time."""
        self._put(self._stop)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _put(self, command: Callable[[], None], future: Future[Any] | None = None) -> None:
        self._inbox.put(command)
        # A thread that has just died empties the inbox after it has set the error: one of both sees this future.
        if self._error is not None and future is not None:
            _settle_future(future, error=self._error)

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._turn()
            self._fail_all(EngineError("the engine was stopped", code="engine-stopped"))
        except BaseException as error:  # handed to every caller, and to all that come later
            problem = f"the decode thread died: {type(error).__name__}: {error}"
            self._fail_all(EngineError(problem, code="engine-died"))
            raise

    def _turn(self) -> None:
        """Carry out what the inbox holds (wait for something if there is no work), then step every batch once."""
        if not self._has_work():
            self._inbox.get()()
            if self._has_work():
                self._inbox.await_burst()
        self._inbox.drain()
        self._settle()
        if self._stopping or not self._has_work():
            return
        if self._pause_mode is None:
            self._admit()
        if self._batch.samples:
            self._batch.step(self._version)
        self._settle()

    def _has_work(self) -> bool:
        if self._pause_mode is None:
            return bool(self._waiting or self._batch.samples)
        return self._pause_mode == "wait" and bool(self._batch.samples)

    def _admit(self) -> None:
        """Waiting requests join the batch, as far as there is room."""
        room = self._max_batch_size - len(self._batch.samples)
        while self._waiting and (len(self._waiting[0].samples) <= room or not self._batch.samples):
            request = self._waiting.pop(0)
            room -= len(request.samples)
            self._running.append(request)
            self._batch.add(request.samples)

    def _settle(self) -> None:
        """Hand out what has ended; say that a pause has been reached."""
        self._batch.drop_finished()
        self._waiting = _without_done(self._waiting)
        self._running = _without_done(self._running)
        if self._pause_mode is not None and not (self._pause_mode == "wait" and self._batch.samples):
            for waiter in self._pause_waiters:
                _settle_future(waiter)
            self._pause_waiters = []

    def _end(self, request_id: str | None) -> None:
        for request in (*self._waiting, *self._running):
            if request_id in (None, request.request_id):
                request.end()

    def _pause(self, mode: PauseMode, done: Future[None]) -> None:
        self._pause_mode = mode
        self._pause_waiters.append(done)
        if mode == "abort":
            self._end(None)

    def _resume(self) -> None:
        self._pause_mode = None

    def _set_version(self, version: int) -> None:
        self._version = version
        self._batch.forget_cache()

    def _stop(self) -> None:
        self._stopping = True

    def _fail_all(self, error: EngineError) -> None:
        self._error = error
        self._inbox.drain()
        futures: list[Future[Any]] = [request.result for request in (*self._waiting, *self._running)]
        for future in (*futures, *self._pause_waiters):
            _settle_future(future, error=error)


def _without_done(requests: Sequence[_PendingRequest]) -> list[_PendingRequest]:
    for request in requests:
        if request.is_done:
            _settle_future(request.result, [s.to_generation() for s in request.samples])
    return [request for request in requests if not request.is_done]


def _settle_future(future: Future[Any], value: Any = None, error: BaseException | None = None) -> None:
    """Set a future, unless its caller gave up and cancelled it."""
    with contextlib.suppress(InvalidStateError):
        if error is None:
            future.set_result(value)
        else:
            future.set_exception(error)
