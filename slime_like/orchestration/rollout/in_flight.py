"""Requests of one caller on their way through a pool of engines."""

from __future__ import annotations

import time
import uuid
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from slime_like.errors import EngineError
from slime_like.interfaces import Generation, GenerationRequest
from slime_like.orchestration.rollout.answers import Answer


class NoEngineLeft(EngineError):
    """Every engine of the pool has died. Requests stay where they are until one has come back."""


class EnginePool(Protocol):
    """What a flight needs of a pool; its members are numbers that are never used twice."""

    def acquire(self, tokens: int) -> int | None:
        """A member with room, charged with ``tokens``. Raises ``NoEngineLeft`` where there is no member at all."""

    def release(self, member: int, tokens: int) -> None: ...

    def send(self, member: int, flight: str, requests: Sequence[GenerationRequest]) -> None:
        """Returns at once; ``flight`` is who asks."""

    def ask(self, member: int, flight: str) -> Any:
        """A reference to the flight's answers that are there as soon as there is one."""

    def wait(self, references: Sequence[Any], timeout_s: float) -> list[Any]:
        """Those that are there when the first is; none after ``timeout_s``."""

    def answers(self, member: int, reference: Any) -> list[Answer]:
        """Raises ``EngineError`` where there are none: the engine has failed."""

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

    An engine is sent its requests together, and asked for answers, not for each of them: Ray's calls would otherwise be
    a part of a short step. Requests of an engine that dies are sent to another one from their beginning;
    ``poll`` says so by ``moved``.

    Args:
        pool: may be shared with other flights.
        silence_s: longest time without any answer while requests run.

    Attributes:
        moved: ids of requests that were sent again because their engine had died.
    """

    def __init__(self, pool: EnginePool, silence_s: float) -> None:
        self._pool = pool
        self._silence_s = silence_s
        self._name = uuid.uuid4().hex
        self._queue: deque[GenerationRequest] = deque()
        self._running: dict[str, _Running] = {}
        self._asked: dict[Any, int] = {}  # which member each reference is of
        self._unwanted: set[str] = set()
        self._last_answer = time.monotonic()
        self.moved: list[str] = []

    def __len__(self) -> int:
        """Requests that have not been answered."""
        return len(self._queue) + len(self._running)

    def submit(self, request: GenerationRequest) -> None:
        """Queue a request, of an id that no other one on its way has; it is sent by the next ``poll``."""
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
        ready = self._pool.wait(list(self._asked), timeout_s)
        answers = [answer for reference in ready for answer in self._settle(reference)]
        self._bound_silence(bool(ready))
        return answers

    def abort(self, request_ids: Collection[str]) -> None:
        """End these requests; they are never answered."""
        self._queue = deque(request for request in self._queue if request.request_id not in request_ids)
        for request_id, running in self._running.items():
            if request_id in request_ids:
                self._unwanted.add(request_id)
                self._pool.abort(running.member, request_id)

    def _send(self) -> None:
        sent: dict[int, list[GenerationRequest]] = {}
        try:
            while self._queue and (member := self._acquire(self._queue[0])) is not None:
                sent.setdefault(member, []).append(self._queue.popleft())
        finally:  # also where there is no engine for the next one
            for member, requests in sent.items():
                self._pool.send(member, self._name, requests)
        for member in {running.member for running in self._running.values()} - set(self._asked.values()):
            self._asked[self._pool.ask(member, self._name)] = member

    def _acquire(self, request: GenerationRequest) -> int | None:
        tokens = len(request.prompt_tokens) + request.num_samples * request.sampling.max_new_tokens
        member = self._pool.acquire(tokens)
        if member is not None:
            self._running[request.request_id] = _Running(request, member, tokens)
        return member

    def _settle(self, reference: Any) -> list[tuple[GenerationRequest, list[Generation]]]:
        """What a member has answered; where that is an error, and the member is lost, all that it had is moved."""
        member = self._asked.pop(reference)
        try:
            answers = self._pool.answers(member, reference)
        except EngineError as death:
            self._lose(member, [], death)
            return []
        ended = [(self._end(answer.request_id), answer) for answer in answers]
        failed = [(running, answer.error) for running, answer in ended if running and answer.error]
        if failed:
            _, error = failed[0]
            if not isinstance(error, EngineError):
                raise error
            self._lose(member, [running for running, _ in failed], error)
        return [(running.request, answer.generations) for running, answer in ended if running and not answer.error]

    def _end(self, request_id: str) -> _Running | None:
        """A request that has been answered; none if nobody wants the answer."""
        running = self._running.pop(request_id)
        self._pool.release(running.member, running.tokens)
        if request_id in self._unwanted:
            self._unwanted.discard(request_id)
            return None
        return running

    def _lose(self, member: int, failed: Sequence[_Running], error: EngineError) -> None:
        """Back to the head of the queue with what ``failed``, and everything else that the member had.

        Raises:
            EngineError: ``error``, if the member is not lost.
        """
        if not self._pool.lose(member, error):
            raise error
        others = [running for running in self._running.values() if running.member == member]
        for running in others:
            del self._running[running.request.request_id]
        lost = [*failed, *others]
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
