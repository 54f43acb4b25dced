"""The generation pool: requests go to the engine with the least outstanding tokens, answers come back in order."""

import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from slime_like.config import RunConfig
from slime_like.errors import EngineError
from slime_like.interfaces import Generation, GenerationRequest
from slime_like.orchestration.cluster.ray_calls import located, one
from slime_like.orchestration.rollout.engine_client import Answer, EngineClient, NoEngineLeft
from slime_like.orchestration.rollout.registry import WorkerRegistry
from slime_like.orchestration.rollout.supervisor import EngineSupervisor
from slime_like.system.interrupts import raise_if_interrupted

_POLL_S = 5.0
"""Longest wait for answers before interrupts are looked for."""


class RolloutManager:
    """Places requests on the engines that serve (``EnginePool``). Thread-safe."""

    def __init__(self, config: RunConfig, supervisor: EngineSupervisor) -> None:
        self.supervisor = supervisor
        # The engines bound each request themselves; this bound is for an engine that no longer answers at all.
        self._silence_s = config.rollout.request_timeout_s + 60
        self._lock = threading.Lock()
        self._registry = WorkerRegistry(config.rollout.max_concurrent_requests)

    # ------------------------------------------------------------------------------------------------ see EnginePool
    def acquire(self, tokens: int) -> int | None:
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

    def send(self, member: int, client: str, requests: Sequence[GenerationRequest]) -> None:
        self.supervisor.actor(member).submit.remote(client, requests)

    def ask(self, member: int, client: str) -> Any:
        return self.supervisor.actor(member).answers.remote(client)

    def wait(self, references: Sequence[Any], timeout_s: float) -> list[Any]:
        return self.supervisor.engines.wait(references, timeout_s)

    def answers(self, member: int, reference: Any) -> list[Answer]:
        name, phase = self.describe(member), "generating"
        found: list[Answer] = one(reference, name, phase=phase, error=EngineError)
        return [
            answer if answer.error is None else replace(answer, error=located(answer.error, name, phase))
            for answer in found
        ]

    def lose(self, member: int, error: EngineError) -> bool:
        return self.supervisor.lose(member, error)

    def abort(self, member: int, request_id: str) -> None:
        self.supervisor.actor(member).abort.remote(request_id)

    def describe(self, member: int) -> str:
        return self.supervisor.name(member)

    # --------------------------------------------------------------------------------------------------- generation
    def client(self) -> EngineClient:
        """A client of this pool, without requests."""
        return EngineClient(self, self._silence_s)

    def generate(self, requests: Sequence[GenerationRequest]) -> list[list[Generation]]:
        """All responses of every request, in the order of the requests. Call where the weight sync may be used.

        Raises:
            EngineError: an engine refused, a request outlived ``rollout.request_timeout_s``, or no restart is left for
                an engine that has died.
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
        return [answers[request.request_id] for request in requests]
