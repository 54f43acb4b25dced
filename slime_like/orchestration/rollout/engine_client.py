"""Generation: requests go to the engine with the fewest outstanding tokens, and answers return as they are ready.

If an engine dies, its requests return to the head of the queue (``supervisor.py``).
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from slime_like.errors import EngineError
from slime_like.interfaces import Generation, GenerationRequest
from slime_like.observability.waiting import ignore_answers
from slime_like.orchestration.cluster.ray_calls import one
from slime_like.orchestration.rollout.supervisor import EngineStart, EngineSupervisor, NoEngineLeft
from slime_like.system.interrupts import raise_if_interrupted

_POLL_S = 5.0
"""Longest wait for answers between checks for interrupts."""

Tag = TypeVar("Tag")


@dataclass(frozen=True, slots=True)
class _Sent(Generic[Tag]):
    tag: Tag
    request: GenerationRequest
    engine: EngineStart
    tokens: int


class EngineClient(Generic[Tag]):
    """Sends requests to the least loaded engine and returns answers as they arrive. Use from one thread.

    A request has a tag, which its answer carries. If an engine dies, its requests are sent again from the beginning.

    Attributes:
        resent: tags of requests that were queued again because their engine died; the caller clears it.
    """

    def __init__(self, supervisor: EngineSupervisor) -> None:
        self._supervisor = supervisor
        self._silence_s = supervisor.engines.silence_s
        self._queue: deque[tuple[Tag, GenerationRequest]] = deque()
        self._sent: dict[Any, _Sent[Tag]] = {}  # by Ray's reference to the answer
        self._last_answer = time.monotonic()
        self.resent: list[Tag] = []

    def __len__(self) -> int:
        """Return the number of unanswered requests."""
        return len(self._queue) + len(self._sent)

    def submit(self, tag: Tag, request: GenerationRequest) -> None:
        """Queue a request for the next ``poll``. Its id must be unique among unanswered requests."""
        if not self._sent:
            self._last_answer = time.monotonic()
        self._queue.append((tag, request))

    def poll(self, timeout_s: float) -> list[tuple[Tag, list[Generation]]]:
        """Send all requests that engines have room for, then wait at most ``timeout_s`` for the first answers.

        Raises:
            NoEngineLeft: nothing can be sent; a later ``poll`` continues from here.
            EngineError: an engine refused a request, or no engine has answered for too long.
        """
        self._send()
        if not self._sent:
            return []
        answers: list[tuple[Tag, list[Generation]]] = []
        lost: list[_Sent[Tag]] = []
        ready = self._supervisor.engines.wait(list(self._sent), timeout_s)
        for reference in ready:
            sent = self._sent.pop(reference)
            self._supervisor.release(sent.engine, sent.tokens)
            try:
                found = one(reference, sent.engine.name, phase="generating", error=EngineError)
                answers.append((sent.tag, found))
            except EngineError as error:
                if not self._supervisor.lose(sent.engine, error):
                    raise
                lost.append(sent)
        self._queue_again(lost)
        self._require_progress(bool(ready))
        return answers

    def generate(
        self: "EngineClient[int]",
        requests: Sequence[GenerationRequest],
        answered: Callable[[int], None] = ignore_answers,
    ) -> list[list[Generation]]:
        """Return all responses of every request, in request order. Call where a weight sync is possible.

        Args:
            answered: called with the number of answered requests whenever it may have changed.

        Raises:
            EngineError: an engine refused, a request exceeded ``rollout.request_timeout_s``, or a dead engine has no
                restart left.
        """
        for place, request in enumerate(requests):
            self.submit(place, request)
        answers: dict[int, list[Generation]] = {}
        while len(self):
            raise_if_interrupted()
            try:
                answers |= dict(self.poll(_POLL_S))
            except NoEngineLeft:
                self._supervisor.revive()
            answered(len(answers))
        return [answers[place] for place in range(len(requests))]

    def abort(self) -> None:
        """End all requests. They are never answered."""
        for reference, sent in self._sent.items():
            self._supervisor.engines.cancel(reference)
            self._supervisor.release(sent.engine, sent.tokens)
        self._queue.clear()
        self._sent.clear()

    def _send(self) -> None:
        while self._queue:
            tag, request = self._queue[0]
            tokens = len(request.prompt.token_ids) + request.num_samples * request.sampling.max_new_tokens
            engine = self._supervisor.acquire(tokens)
            if engine is None:
                return
            self._queue.popleft()
            reference = engine.actor.generate.remote(request)
            self._sent[reference] = _Sent(tag, request, engine, tokens)

    def _queue_again(self, lost: Sequence[_Sent[Tag]]) -> None:
        self._queue.extendleft((sent.tag, sent.request) for sent in reversed(lost))
        self.resent += [sent.tag for sent in lost]

    def _require_progress(self, answered: bool) -> None:
        if answered or not self._sent:
            self._last_answer = time.monotonic()
        elif time.monotonic() - self._last_answer > self._silence_s:
            self._end_silence()

    def _end_silence(self) -> None:
        """Lose unhealthy engines.

        Raises:
            EngineError: all engines are healthy, or none may be replaced.
        """
        engines = {sent.engine for sent in self._sent.values()}
        names = ", ".join(sorted(engine.name for engine in engines))
        error = EngineError(
            f"{names} gave no answer for {self._silence_s:.0f} s while generating", code="engines-silent"
        )
        lost = {engine for engine in engines if self._supervisor.lose(engine, error)}
        if not lost:
            raise error
        silent = [reference for reference, sent in self._sent.items() if sent.engine in lost]
        self._queue_again([self._sent.pop(reference) for reference in silent])
        self._last_answer = time.monotonic()
