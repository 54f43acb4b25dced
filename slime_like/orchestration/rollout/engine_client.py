"""Generation: requests go to the engine with the fewest outstanding tokens, and answers return as they are ready.

If an engine dies, its requests wait for another one (``supervisor.py``).
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from slime_like.errors import EngineError
from slime_like.interfaces import Generation, GenerationRequest, RequestBatch
from slime_like.observability.waiting import ignore_answers
from slime_like.orchestration.cluster.ray_calls import one
from slime_like.orchestration.rollout.supervisor import EngineStart, EngineSupervisor, NoEngineLeft
from slime_like.system.interrupts import raise_if_interrupted

_POLL_S = 5.0
"""Longest wait for answers between checks for interrupts."""


@dataclass(eq=False, slots=True)
class EngineCall:
    """A request until its answer.

    Attributes:
        engine: engine that has it; ``None`` while it waits for one with room.
        answer: Ray's reference to the answer.
    """

    request: GenerationRequest
    engine: EngineStart | None = None
    answer: Any = None

    @property
    def tokens(self) -> int:
        """Largest number of tokens that it needs."""
        request = self.request
        return len(request.prompt.token_ids) + (request.num_samples + request.greedy) * request.sampling.max_new_tokens


Call = TypeVar("Call", bound=EngineCall)


class EngineClient:
    """Sends requests to the least loaded engine and returns answers as they arrive. Use from one thread.

    The caller keeps its calls. If an engine dies, its requests are sent again from the beginning.
    """

    def __init__(self, supervisor: EngineSupervisor) -> None:
        self._supervisor = supervisor
        self._silence_s = supervisor.engines.silence_s
        self._last_answer = time.monotonic()

    def poll(self, calls: Sequence[Call], timeout_s: float) -> tuple[list[tuple[Call, list[Generation]]], list[Call]]:
        """Send all calls that engines have room for, then wait at most ``timeout_s`` for the first answers.

        Args:
            calls: all unanswered calls, in the order to send them. Ids of requests must be unique.

        Returns:
            The answered calls, and those that wait again because their engine died.

        Raises:
            NoEngineLeft: nothing can be sent; a later ``poll`` continues from here.
            EngineError: an engine refused a request, or no engine has answered for too long.
        """
        self._send(calls)
        sent = {call.answer: (call, call.engine) for call in calls if call.engine is not None}
        if not sent:
            return [], []
        answers: list[tuple[Call, list[Generation]]] = []
        lost: list[Call] = []
        ready = self._supervisor.engines.wait(list(sent), timeout_s)
        for reference in ready:
            call, engine = sent[reference]
            self._supervisor.release(engine, call.tokens)
            try:
                answers.append((call, one(reference, engine.name, phase="generating", error=EngineError)))
            except EngineError as error:
                if not self._supervisor.lose(engine, error):
                    raise
                lost.append(call)
        if ready:
            self._last_answer = time.monotonic()
        elif time.monotonic() - self._last_answer > self._silence_s:
            lost = self._end_silence([call for call, _ in sent.values()])
        for call in lost:
            call.engine = call.answer = None
        return answers, lost

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
        places = {EngineCall(request): place for place, request in enumerate(requests)}  # of unanswered calls
        answers: dict[int, list[Generation]] = {}
        while places:
            raise_if_interrupted()
            try:
                answers |= {places.pop(call): found for call, found in self.poll(list(places), _POLL_S)[0]}
            except NoEngineLeft:
                self._supervisor.revive()
            answered(len(answers))
        return [answers[place] for place in range(len(requests))]

    def abort(self, calls: Sequence[EngineCall]) -> None:
        """End the calls. The caller must forget them."""
        for call in calls:
            if call.engine is not None:
                self._supervisor.engines.cancel(call.answer)
                self._supervisor.release(call.engine, call.tokens)

    def _send(self, calls: Sequence[EngineCall]) -> None:
        waiting = [call for call in calls if call.engine is None]
        if len(waiting) == len(calls):
            self._last_answer = time.monotonic()
        batches: dict[EngineStart, list[EngineCall]] = {}
        for call in waiting:
            engine = self._supervisor.acquire(call.tokens)
            if engine is None:
                break
            batches.setdefault(engine, []).append(call)
        for engine, batch in batches.items():
            name = batch[0].request.request_id
            for place, call in enumerate(batch):
                request = replace(call.request, batch=RequestBatch(name, len(batch), place))
                call.engine, call.answer = engine, engine.actor.generate.remote(request)

    def _end_silence(self, sent: Sequence[Call]) -> list[Call]:
        """Lose unhealthy engines. Return their calls.

        Raises:
            EngineError: all engines are healthy, or none may be replaced.
        """
        engines = {call.engine for call in sent if call.engine is not None}
        names = ", ".join(sorted(engine.name for engine in engines))
        error = EngineError(
            f"{names} gave no answer for {self._silence_s:.0f} s while generating", code="engines-silent"
        )
        lost = {engine for engine in engines if self._supervisor.lose(engine, error)}
        if not lost:
            raise error
        self._last_answer = time.monotonic()
        return [call for call in sent if call.engine in lost]
