"""EngineClient: sends the requests of one caller to a pool of engines, and collects the answers."""

import time
import uuid
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from slime_like.errors import EngineError, SlimeLikeError
from slime_like.interfaces import Generation, GenerationRequest


@dataclass(frozen=True, slots=True)
class Answer:
    """The result of one request: its responses, or the error."""

    request_id: str
    generations: list[Generation] = field(default_factory=list)
    error: SlimeLikeError | None = None


class NoEngineLeft(EngineError):
    """Death of the pool's last engine. Requests wait until an engine joins."""

    code = "no-engine"


class EnginePool(Protocol):
    """The pool as a client sees it; members are numbers that are never used twice."""

    def acquire(self, tokens: int) -> int | None:
        """A member with room, charged with ``tokens``. Raises ``NoEngineLeft`` where there is no member at all."""

    def release(self, member: int, tokens: int) -> None: ...

    def send(self, member: int, client: str, requests: Sequence[GenerationRequest]) -> None:
        """Returns at once."""

    def ask(self, member: int, client: str) -> Any:
        """A reference that is ready as soon as the member has an answer for ``client``."""

    def wait(self, references: Sequence[Any], timeout_s: float) -> list[Any]:
        """The references that are ready when the first one is; none after ``timeout_s``."""

    def answers(self, member: int, reference: Any) -> list[Answer]:
        """Read a ready reference. Raises ``EngineError`` if the engine has failed."""

    def lose(self, member: int, error: EngineError) -> bool:
        """Remove the engine from the pool if it is dead; called after a failed request. True if it is removed."""

    def abort(self, member: int, request_id: str) -> None: ...

    def describe(self, member: int) -> str: ...


@dataclass(frozen=True, slots=True)
class _Running:
    request: GenerationRequest
    member: int
    tokens: int


class EngineClient:
    """Sends requests to the least loaded engine and hands out answers as they come. Use from one thread.

    One call sends an engine all of its requests, and one call waits for any of its answers: a Ray call per request
    would take a large part of a short step. Requests of an engine that dies are sent again, from their beginning.

    Args:
        pool: may be shared with other clients.
        silence_s: longest time without any answer while requests run.

    Attributes:
        resent: ids of requests that were queued again because their engine had died; the caller clears it.
    """

    def __init__(self, pool: EnginePool, silence_s: float) -> None:
        self._pool = pool
        self._silence_s = silence_s
        self._name = uuid.uuid4().hex
        self._queue: deque[GenerationRequest] = deque()
        self._running: dict[str, _Running] = {}
        self._awaited: dict[Any, int] = {}  # reference -> member
        self._aborted: set[str] = set()
        self._last_answer = time.monotonic()
        self.resent: list[str] = []

    def __len__(self) -> int:
        """Requests that have not been answered."""
        return len(self._queue) + len(self._running)

    def submit(self, request: GenerationRequest) -> None:
        """Queue a request whose id is unique among those not answered; it is sent by the next ``poll``."""
        if not self._running:
            self._last_answer = time.monotonic()
        self._queue.append(request)

    def poll(self, timeout_s: float) -> list[tuple[GenerationRequest, list[Generation]]]:
        """Send what can be sent, then wait at most ``timeout_s`` for the first answers.

        Raises:
            NoEngineLeft: nothing can be sent; a later ``poll`` continues where this one stopped.
            EngineError: an engine refused a request, or none has answered for too long.
        """
        self._send()
        if not self._running:
            return []
        ready = self._pool.wait(list(self._awaited), timeout_s)
        answers = [answer for reference in ready for answer in self._settle(reference)]
        self._require_progress(bool(ready))
        return answers

    def abort(self, request_ids: Collection[str]) -> None:
        """End these requests; they are never answered."""
        self._queue = deque(request for request in self._queue if request.request_id not in request_ids)
        for request_id, running in self._running.items():
            if request_id in request_ids:
                self._aborted.add(request_id)
                self._pool.abort(running.member, request_id)

    def _send(self) -> None:
        sent: dict[int, list[GenerationRequest]] = {}
        try:
            while self._queue and (member := self._acquire(self._queue[0])) is not None:
                sent.setdefault(member, []).append(self._queue.popleft())
        finally:  # also where there is no engine for the next one
            for member, requests in sent.items():
                self._pool.send(member, self._name, requests)
        for member in {running.member for running in self._running.values()} - set(self._awaited.values()):
            self._awaited[self._pool.ask(member, self._name)] = member

    def _acquire(self, request: GenerationRequest) -> int | None:
        tokens = len(request.prompt_tokens) + request.num_samples * request.sampling.max_new_tokens
        member = self._pool.acquire(tokens)
        if member is not None:
            self._running[request.request_id] = _Running(request, member, tokens)
        return member

    def _settle(self, reference: Any) -> list[tuple[GenerationRequest, list[Generation]]]:
        """A member's answers. If one is an error and the member is dead, all of its requests are queued again."""
        member = self._awaited.pop(reference)
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
        running = self._running.pop(request_id)
        self._pool.release(running.member, running.tokens)
        if request_id in self._aborted:
            self._aborted.discard(request_id)
            return None
        return running

    def _lose(self, member: int, failed: Sequence[_Running], error: EngineError) -> None:
        """Put all requests of a dead member at the head of the queue, those that ``failed`` first.

        Raises:
            EngineError: ``error``, if the member is alive.
        """
        if not self._pool.lose(member, error):
            raise error
        others = [running for running in self._running.values() if running.member == member]
        for running in others:
            del self._running[running.request.request_id]
        lost = [*failed, *others]
        wanted = [running.request for running in lost if running.request.request_id not in self._aborted]
        self._aborted -= {running.request.request_id for running in lost}
        self._queue.extendleft(reversed(wanted))
        self.resent += [request.request_id for request in wanted]

    def _require_progress(self, answered: bool) -> None:
        if answered or not self._running:
            self._last_answer = time.monotonic()
        elif time.monotonic() - self._last_answer > self._silence_s:
            silent = sorted({self._pool.describe(running.member) for running in self._running.values()})
            raise EngineError(
                f"{', '.join(silent)} answered nothing for {self._silence_s:.0f} s while generating",
                code="engines-silent",
            )
