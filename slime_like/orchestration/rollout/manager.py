"""Generation: requests go to the engine with the fewest outstanding tokens, and answers return as they are ready.

If an engine dies, its requests return to the head of the queue (``supervisor.py``).
"""

import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from slime_like.config import RunConfig
from slime_like.errors import EngineError
from slime_like.interfaces import Generation, GenerationRequest
from slime_like.observability.waiting import ignore_answers
from slime_like.orchestration.cluster.ray_calls import located, one
from slime_like.orchestration.rollout.engine_actor import Answer
from slime_like.orchestration.rollout.routing import LeastLoaded
from slime_like.orchestration.rollout.supervisor import EngineSupervisor
from slime_like.system.interrupts import raise_if_interrupted

_POLL_S = 5.0
"""Longest wait for answers between checks for interrupts."""


class NoEngineLeft(EngineError):
    """The pool's last engine died. Requests wait until an engine joins."""

    code = "no-engine"


class RolloutManager:
    """Assigns requests to serving engines. Engine numbers are never reused. Thread-safe."""

    def __init__(self, config: RunConfig, supervisor: EngineSupervisor) -> None:
        self.supervisor = supervisor
        # The engines bound each request. This bound is for an engine that no longer answers.
        self.silence_s = config.silence_s + 60
        self._lock = threading.Lock()
        self._registry = LeastLoaded(config.rollout.max_concurrent_requests)

    def acquire(self, tokens: int) -> int | None:
        """Charge ``tokens`` to an engine with room, and return it. Raises ``NoEngineLeft`` if no engine serves."""
        with self._lock:
            serving = self.supervisor.serving
            if not serving:
                raise NoEngineLeft(self.supervisor.last_death)
            for number in set(self._registry.workers) - set(serving):
                self._registry.leave(number)
            for number in sorted(set(serving) - set(self._registry.workers)):
                self._registry.join(number)
            return self._registry.acquire(tokens)

    def release(self, member: int, tokens: int) -> None:
        with self._lock:
            self._registry.release(member, tokens)

    def client(self) -> "EngineClient":
        """Return a client without requests."""
        return EngineClient(self)

    def generate(
        self, requests: Sequence[GenerationRequest], answered: Callable[[int], None] = ignore_answers
    ) -> list[list[Generation]]:
        """Return all responses of every request, in request order. Call where a weight sync is possible.

        Args:
            answered: called with the number of answered requests whenever it may have changed.

        Raises:
            EngineError: an engine refused, a request exceeded ``rollout.request_timeout_s``, or a dead engine has no
                restart left.
        """
        client = self.client()
        for request in requests:
            client.submit(request)
        answers: dict[str, list[Generation]] = {}
        while len(client):
            raise_if_interrupted()
            try:
                answers |= {request.request_id: found for request, found in client.poll(_POLL_S)}
            except NoEngineLeft:
                self.supervisor.revive()
            answered(len(answers))
        return [answers[request.request_id] for request in requests]


@dataclass(frozen=True, slots=True)
class _Running:
    request: GenerationRequest
    member: int
    tokens: int


class EngineClient:
    """Sends requests to the least loaded engine and returns answers as they arrive. Use from one thread.

    One call sends an engine all its requests, and one call waits for any of its answers. A Ray call per request would
    take a large part of a short step. If an engine dies, its requests are sent again from the beginning.

    Attributes:
        resent: ids of requests that were queued again because their engine died; the caller clears it.
    """

    def __init__(self, manager: RolloutManager) -> None:
        self._manager = manager
        self._supervisor = manager.supervisor
        self._name = uuid.uuid4().hex
        self._queue: deque[GenerationRequest] = deque()
        self._running: dict[str, _Running] = {}
        self._awaited: dict[Any, int] = {}  # reference -> member
        self._aborted: set[str] = set()
        self._last_answer = time.monotonic()
        self.resent: list[str] = []

    def __len__(self) -> int:
        """Return the number of unanswered requests."""
        return len(self._queue) + len(self._running)

    def submit(self, request: GenerationRequest) -> None:
        """Queue a request for the next ``poll``. Its id must be unique among unanswered requests."""
        if not self._running:
            self._last_answer = time.monotonic()
        self._queue.append(request)

    def poll(self, timeout_s: float) -> list[tuple[GenerationRequest, list[Generation]]]:
        """Send all requests that engines have room for, then wait at most ``timeout_s`` for the first answers.

        Raises:
            NoEngineLeft: nothing can be sent; a later ``poll`` continues from here.
            EngineError: an engine refused a request, or no engine has answered for too long.
        """
        self._send()
        if not self._running:
            return []
        ready = self._supervisor.engines.wait(list(self._awaited), timeout_s)
        answers = [answer for reference in ready for answer in self._settle(reference)]
        self._require_progress(bool(ready))
        return answers

    def abort(self, request_ids: Collection[str]) -> None:
        """Abort these requests. They are never answered."""
        self._queue = deque(request for request in self._queue if request.request_id not in request_ids)
        for request_id, running in self._running.items():
            if request_id in request_ids:
                self._aborted.add(request_id)
                self._supervisor.actor(running.member).abort.remote(request_id)

    def _send(self) -> None:
        sent: dict[int, list[GenerationRequest]] = {}
        try:
            while self._queue and (member := self._acquire(self._queue[0])) is not None:
                sent.setdefault(member, []).append(self._queue.popleft())
        finally:  # also if there is no engine for the next request
            for member, requests in sent.items():
                self._supervisor.actor(member).submit.remote(self._name, requests)
        for member in {running.member for running in self._running.values()} - set(self._awaited.values()):
            self._awaited[self._supervisor.actor(member).answers.remote(self._name)] = member

    def _acquire(self, request: GenerationRequest) -> int | None:
        tokens = len(request.prompt_tokens) + request.num_samples * request.sampling.max_new_tokens
        member = self._manager.acquire(tokens)
        if member is not None:
            self._running[request.request_id] = _Running(request, member, tokens)
        return member

    def _settle(self, reference: Any) -> list[tuple[GenerationRequest, list[Generation]]]:
        """Return a member's answers. If one is an error and the member is dead, queue all its requests again."""
        member = self._awaited.pop(reference)
        name, phase = self._supervisor.name(member), "generating"
        try:
            answers: list[Answer] = one(reference, name, phase=phase, error=EngineError)
        except EngineError as death:
            self._lose(member, [], death)
            return []
        ended = [(self._end(answer.request_id), answer) for answer in answers]
        failed = [(running, answer.error) for running, answer in ended if running and answer.error]
        if failed:
            error = located(failed[0][1], name, phase)
            if not isinstance(error, EngineError):
                raise error
            self._lose(member, [running for running, _ in failed], error)
        return [(running.request, answer.generations) for running, answer in ended if running and not answer.error]

    def _end(self, request_id: str) -> _Running | None:
        running = self._running.pop(request_id)
        self._manager.release(running.member, running.tokens)
        if request_id in self._aborted:
            self._aborted.discard(request_id)
            return None
        return running

    def _lose(self, member: int, failed: Sequence[_Running], error: EngineError) -> None:
        """Return all requests of a dead member to the head of the queue, with the ``failed`` ones first.

        Raises:
            EngineError: ``error``, if the member is alive.
        """
        if not self._supervisor.lose(member, error):
            raise error
        self._queue_again(member, failed)

    def _queue_again(self, member: int, failed: Sequence[_Running] = ()) -> None:
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
        elif time.monotonic() - self._last_answer > self._manager.silence_s:
            self._end_silence({running.member for running in self._running.values()})

    def _end_silence(self, members: Collection[int]) -> None:
        """Lose unhealthy members.

        Raises:
            EngineError: all members are healthy, or none may be replaced.
        """
        names = ", ".join(sorted(self._supervisor.name(member) for member in members))
        error = EngineError(
            f"{names} answered nothing for {self._manager.silence_s:.0f} s while generating", code="engines-silent"
        )
        lost = [member for member in members if self._supervisor.lose(member, error)]
        if not lost:
            raise error
        for member in lost:
            self._queue_again(member)
        self._last_answer = time.monotonic()
