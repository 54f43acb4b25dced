"""Requests of one caller on their way through a pool of engines."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Protocol

import ray

from slime_like.errors import EngineError
from slime_like.interfaces import Generation, GenerationRequest

# Answers that arrive within this time of each other are taken together.
_TOGETHER_S = 0.005


class NoEngineLeft(EngineError):
    """Every engine of the pool has died. Requests stay where they are until one has come back."""


class EnginePool(Protocol):
    """What a flight needs of a pool; its members are numbers that are never used twice."""

    def acquire(self, tokens: int) -> int | None:
        """A member with room, charged with ``tokens``. Raises ``NoEngineLeft`` where there is no member at all."""

    def release(self, member: int, tokens: int) -> None: ...

    def send(self, member: int, request: GenerationRequest) -> Any:
        """A Ray reference to the answer."""

    def answer(self, member: int, reference: Any) -> list[Generation]:
        """Raises ``EngineError``."""

    def lose(self, member: int, error: EngineError) -> bool:
        """After a failed request: ask whether the engine lives; if not, take it out of the pool. True if it is out."""

    def abort(self, member: int, request_id: str) -> None: ...

    def describe(self, member: int) -> str: ...


@dataclass(frozen=True, slots=True)
class _Running:
    request: GenerationRequest
    member: int
    tokens: int


class Flight:
    """Sends requests to the least loaded engine and hands out answers as they come. Use from one thread.

    Requests of an engine that dies are sent to another one from their beginning; ``poll`` says so by ``moved``.

    Args:
        pool: may be shared with other flights.
        silence_s: longest time without any answer while requests run.

    Attributes:
        moved: ids of requests that were sent again because their engine had died.
    """

    def __init__(self, pool: EnginePool, silence_s: float) -> None:
        self._pool = pool
        self._silence_s = silence_s
        self._queue: deque[GenerationRequest] = deque()
        self._running: dict[Any, _Running] = {}
        self._unwanted: set[str] = set()
        self._last_answer = time.monotonic()
        self.moved: list[str] = []

    def __len__(self) -> int:
        """Requests that have not been answered."""
        return len(self._queue) + len(self._running)

    def submit(self, request: GenerationRequest) -> None:
        """Queue a request; it is sent by the next ``poll``."""
        if not self._running:
            self._last_answer = time.monotonic()
        self._queue.append(request)

    def poll(self, timeout_s: float) -> list[tuple[GenerationRequest, list[Generation]]]:
        """Send what can be sent, then wait at most ``timeout_s`` for the first answers.

        Raises:
            NoEngineLeft: nothing can be sent; a later ``poll`` goes on where this one stopped.
            EngineError: an engine refused a request, or none has answered for too long.
        """
        self._send()
        if not self._running:
            return []
        references = list(self._running)
        ready, _ = ray.wait(references, num_returns=len(references), timeout=min(_TOGETHER_S, timeout_s))
        if not ready:
            ready, _ = ray.wait(references, num_returns=1, timeout=timeout_s)
        answers = [answer for reference in ready if (answer := self._settle(reference)) is not None]
        self._bound_silence(bool(ready))
        return answers

    def abort(self, request_ids: Collection[str]) -> None:
        """End these requests; they are never answered."""
        self._queue = deque(request for request in self._queue if request.request_id not in request_ids)
        for running in self._running.values():
            if running.request.request_id in request_ids:
                self._unwanted.add(running.request.request_id)
                self._pool.abort(running.member, running.request.request_id)

    def _send(self) -> None:
        while self._queue:
            request = self._queue[0]
            tokens = len(request.prompt_tokens) + request.num_samples * request.sampling.max_new_tokens
            member = self._pool.acquire(tokens)
            if member is None:
                return
            self._queue.popleft()
            self._running[self._pool.send(member, request)] = _Running(request, member, tokens)

    def _settle(self, reference: Any) -> tuple[GenerationRequest, list[Generation]] | None:
        running = self._running.pop(reference, None)
        if running is None:  # its engine was lost a moment ago
            return None
        self._pool.release(running.member, running.tokens)
        try:
            generations = self._pool.answer(running.member, reference)
        except EngineError as error:
            if running.request.request_id in self._unwanted:
                self._unwanted.discard(running.request.request_id)
                return None
            if not self._pool.lose(running.member, error):
                raise
            self._move(running)
            return None
        if running.request.request_id in self._unwanted:
            self._unwanted.discard(running.request.request_id)
            return None
        return running.request, generations

    def _move(self, failed: _Running) -> None:
        """Back to the head of the queue, together with everything else that the lost engine had."""
        others = [reference for reference, running in self._running.items() if running.member == failed.member]
        lost = [failed, *(self._running.pop(reference) for reference in others)]
        wanted = [running.request for running in lost if running.request.request_id not in self._unwanted]
        self._unwanted -= {running.request.request_id for running in lost}
        self._queue.extendleft(reversed(wanted))
        self.moved += [request.request_id for request in wanted]

    def _bound_silence(self, answered: bool) -> None:
        if answered or not self._running:
            self._last_answer = time.monotonic()
        elif time.monotonic() - self._last_answer > self._silence_s:
            silent = sorted({self._pool.describe(running.member) for running in self._running.values()})
            raise EngineError(f"{', '.join(silent)} answered nothing for {self._silence_s:.0f} s while generating")
