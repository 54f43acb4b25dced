"""The decode thread, which admits requests, steps the batch, and pauses between two tokens.

Other threads put commands into an inbox, which the decode thread carries out between two steps. So no lock is held
while the model runs, and every command takes effect at a token boundary.
"""

import contextlib
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from rollout.transformers.decoding import DecodeBatch, Routers
from rollout.transformers.samples import Sample
from slime_like.errors import EngineError
from slime_like.interfaces import Generation, PauseMode, RequestBatch
from slime_like.system.heartbeat import beat


@dataclass(slots=True, eq=False)
class _PendingRequest:
    """One request. ``result`` is set when all samples have finished."""

    request_id: str
    samples: list[Sample]
    batch: RequestBatch | None = None
    result: Future[list[Generation]] = field(default_factory=Future)

    @property
    def is_done(self) -> bool:
        return all(sample.finish_reason is not None for sample in self.samples)

    def end(self) -> None:
        for sample in self.samples:
            if sample.finish_reason is None:
                sample.finish_reason = "abort"


class DecodeScheduler:
    """Owner of the thread. Public methods may be called from any thread, and never wait for a step."""

    def __init__(self, model: Any, max_batch_size: int, routers: Routers | None = None) -> None:
        self._max_batch_size = max_batch_size
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._error: EngineError | None = None
        # Only the decode thread uses the attributes below.
        self._version = 0
        self._arriving: dict[str, dict[int, _PendingRequest]] = {}  # incomplete batches by name; requests by place
        self._waiting: list[_PendingRequest] = []
        self._running: list[_PendingRequest] = []
        self._batch = DecodeBatch(model, routers)
        self._paused = False
        self._pause_waiters: list[Future[None]] = []
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="decode", daemon=True)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive() and self._error is None

    def submit(self, request_id: str, samples: list[Sample], batch: RequestBatch | None) -> Future[list[Generation]]:
        """Queue a request, behind the rest of its batch once all of it is there."""
        request = _PendingRequest(request_id, samples, batch)
        self._put(lambda: self._arrive(request), request.result)
        return request.result

    def abort(self, request_id: str) -> None:
        """End one request. Its caller has canceled it."""
        self._put(lambda: self._end(request_id))

    def pause(self, mode: PauseMode) -> Future[None]:
        """Return a future that is done when sampling has stopped."""
        done: Future[None] = Future()
        self._put(lambda: self._pause(mode, done), done)
        return done

    def resume(self) -> None:
        self._put(partial(setattr, self, "_paused", False))

    def set_version(self, version: int) -> None:
        """Record new weights. Frozen requests recompute their caches. Call while paused."""
        self._put(lambda: self._set_version(version))

    def stop(self, timeout_s: float) -> bool:
        """End the thread; return False if it did not end in time."""
        self._put(partial(setattr, self, "_stopping", True))
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _put(self, command: Callable[[], None], future: Future[Any] | None = None) -> None:
        self._inbox.put(command)
        # A dying thread sets the error and then empties the inbox, so either it or this method sees the future.
        if self._error is not None and future is not None:
            _settle_future(future, error=self._error)

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._turn()
            self._fail_all(EngineError("the engine was stopped", code="engine-stopped"))
        except BaseException as error:  # passed to all current and later callers
            problem = f"the decode thread died: {type(error).__name__}: {error}"
            self._fail_all(EngineError(problem, code="engine-died"))
            raise

    def _turn(self) -> None:
        """Carry out the inbox's commands (wait for one if there is no work), admit requests, then step the batch."""
        if not self._has_work():
            self._inbox.get()()
        self._drain()
        self._settle()
        if self._stopping or not self._has_work():
            return
        room = self._max_batch_size - len(self._batch.samples)
        while self._waiting and (len(self._waiting[0].samples) <= room or not self._batch.samples):
            request = self._waiting.pop(0)
            room -= len(request.samples)
            self._running.append(request)
            self._batch.add(request.samples)
        if self._batch.samples:
            self._batch.step(self._version)
            beat()
        self._settle()

    def _drain(self) -> None:
        while not self._inbox.empty():
            self._inbox.get()()

    def _has_work(self) -> bool:
        return not self._paused and bool(self._waiting or self._batch.samples)

    def _arrive(self, request: _PendingRequest) -> None:
        """Queue a request. A batch is queued when it is complete, in the order in which it was sent.

        So its rows are the same whenever its requests arrive. Their own timeouts bound the wait.
        """
        if (batch := request.batch) is None:
            self._waiting.append(request)
            return
        arrived = self._arriving.setdefault(batch.name, {})
        arrived[batch.place] = request
        if len(arrived) == batch.size:
            del self._arriving[batch.name]
            self._waiting += (arrived[place] for place in sorted(arrived))

    def _settle(self) -> None:
        """Return finished requests, and report that a pause is reached."""
        self._batch.drop_finished()
        self._waiting = _without_done(self._waiting)
        self._running = _without_done(self._running)
        for batch in self._arriving.values():
            _without_done(list(batch.values()))  # a canceled request still counts
        for waiter in self._pause_waiters:
            _settle_future(waiter)
        self._pause_waiters = []

    def _pending(self) -> list[_PendingRequest]:
        return [*self._running, *self._waiting, *(one for batch in self._arriving.values() for one in batch.values())]

    def _end(self, request_id: str | None) -> None:
        for request in self._pending():
            if request_id in (None, request.request_id):
                request.end()

    def _pause(self, mode: PauseMode, done: Future[None]) -> None:
        self._paused = True
        self._pause_waiters.append(done)
        if mode == "abort":
            self._end(None)

    def _set_version(self, version: int) -> None:
        self._version = version
        self._batch.forget_cache()

    def _fail_all(self, error: EngineError) -> None:
        self._error = error
        self._drain()
        futures: list[Future[Any]] = [request.result for request in self._pending()]
        for future in (*futures, *self._pause_waiters):
            _settle_future(future, error=error)


def _without_done(requests: Sequence[_PendingRequest]) -> list[_PendingRequest]:
    for request in requests:
        if request.is_done:
            _settle_future(request.result, [s.to_generation() for s in request.samples])
    return [request for request in requests if not request.is_done]


def _settle_future(future: Future[Any], value: Any = None, error: BaseException | None = None) -> None:
    """Set a future, unless its caller has canceled it."""
    with contextlib.suppress(InvalidStateError):
        if error is None:
            future.set_result(value)
        else:
            future.set_exception(error)
