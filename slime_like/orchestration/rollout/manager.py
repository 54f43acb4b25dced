"""Engines behind one door: requests go to the engine with the least outstanding tokens, answers come back in order."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import ray
from ray.exceptions import RayError

from slime_like.config import RunConfig
from slime_like.errors import EngineError
from slime_like.interfaces import BucketMetadata, EngineHealth, Generation, GenerationRequest, UpdateReceipt
from slime_like.orchestration.cluster.placement import Placement
from slime_like.orchestration.cluster.ray_calls import gather, located, nobody, one
from slime_like.orchestration.rollout.answers import Answer
from slime_like.orchestration.rollout.engine_actor import EngineActor
from slime_like.orchestration.rollout.engine_client import EngineClient, NoEngineLeft
from slime_like.orchestration.rollout.registry import WorkerRegistry
from slime_like.system.interrupts import raise_if_interrupted

# Longest silence between looks at the engines' health while requests run.
_POLL_S = 5.0
_HEALTH_TIMEOUT_S = 15.0
_STOP_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class _Member:
    """One start of one engine."""

    index: int
    actor: Any


class RolloutManager:
    """The generation pool. Engines that die leave it; ``restart_dead`` brings them back. Thread-safe.

    Args:
        watch: called whenever engines are waited for; raises where somebody has died without whom it is in vain.
    """

    def __init__(self, config: RunConfig, placement: Placement, watch: Callable[[], None] = nobody) -> None:
        self._config = config
        self._watch = watch
        self._placement = placement
        self._shared_devices: Sequence[str] = ()
        self._engines: list[Any] = []
        self._lock = threading.Lock()
        self._registry = WorkerRegistry(config.rollout.max_concurrent_requests)
        self._members: dict[int, _Member] = {}  # also those that have left; the registry knows who is in
        self._dead: dict[int, EngineError] = {}
        self._restarts = 0
        self._restarted: list[int] = []
        self._numbers = itertools.count()

    # -------------------------------------------------------------------------------------------------------- start
    def launch(self, shared_devices: Sequence[str] = ()) -> None:
        """Create the actors; they import in the background until ``start`` waits for them.

        Args:
            shared_devices: the device of every trainer rank, for colocated engines.
        """
        self._shared_devices = shared_devices
        for index in range(self._config.rollout.num_engines):
            self._engines.append(self._new_actor(index))

    def _new_actor(self, index: int) -> Any:
        shared = self._shared_devices
        devices = ",".join(shared[rank] for rank in self._placement.shared_ranks(index) if shared)
        options = self._placement.engine_options(index)
        actor = ray.remote(EngineActor).options(**options, max_restarts=0, max_concurrency=10_000)
        return actor.remote(self._config, index, devices)

    def start(self) -> None:
        """Wait until every engine has loaded the model; bounded by ``rollout.start_timeout_s``."""
        self._call("start", phase="starting", timeout_s=self._start_timeout_s)
        for index in range(len(self._engines)):
            self._join(index)

    @property
    def _start_timeout_s(self) -> float:
        # The engine bounds its own start; the slack here is for the actor's imports.
        return self._config.rollout.start_timeout_s + 120

    @property
    def num_engines(self) -> int:
        return len(self._engines)

    # ------------------------------------------------------------------------------------------------------ members
    def _join(self, index: int) -> None:
        with self._lock:
            member = next(self._numbers)
            self._members[member] = _Member(index, self._engines[index])
            self._registry.join(member)

    def acquire(self, tokens: int) -> int | None:
        """See ``EnginePool``."""
        with self._lock:
            if not self._registry.workers:
                raise NoEngineLeft(str(next(iter(self._dead.values()), "no engine has been started")))
            return self._registry.acquire(tokens)

    def release(self, member: int, tokens: int) -> None:
        """See ``EnginePool``."""
        with self._lock:
            self._registry.release(member, tokens)

    def send(self, member: int, client: str, requests: Sequence[GenerationRequest]) -> None:
        """See ``EnginePool``."""
        self._members[member].actor.submit.remote(client, requests)

    def ask(self, member: int, client: str) -> Any:
        """See ``EnginePool``."""
        return self._members[member].actor.answers.remote(client)

    def wait(self, references: Sequence[Any], timeout_s: float) -> list[Any]:
        """See ``EnginePool``."""
        ready, _ = ray.wait(list(references), num_returns=1, timeout=timeout_s)
        self._watch()
        if ready:
            ready, _ = ray.wait(list(references), num_returns=len(references), timeout=0)
        return list(ready)

    def answers(self, member: int, reference: Any) -> list[Answer]:
        """See ``EnginePool``."""
        name, phase = self.describe(member), "generating"
        found: list[Answer] = one(reference, name, phase=phase, error=EngineError)
        return [
            answer if answer.error is None else replace(answer, error=located(answer.error, name, phase))
            for answer in found
        ]

    def lose(self, member: int, error: EngineError) -> bool:
        """See ``EnginePool``. Where no restart is left, a dead engine is not lost: its error ends the run."""
        with self._lock:
            if member not in self._registry.workers:
                return True
        known = self._members[member]
        if self._restarts_left <= 0 or _is_alive(known.actor):
            return False
        with self._lock:
            if member in self._registry.workers:  # another thread may have been faster
                self._registry.leave(member)
                self._dead[known.index] = error
        return True

    def lose_dead(self, error: EngineError) -> bool:
        """Take every dead engine out of the pool after a failed sync; False where none is dead or may be replaced."""
        self._restarted.clear()  # nobody has been given the whole of the weights
        with self._lock:
            members = list(self._registry.workers)
        for member in members:
            self.lose(member, error)
        return bool(self._dead) and self._restarts_left >= 0

    @property
    def _restarts_left(self) -> int:
        waiting = len(self._dead) - len(self._restarted)
        return self._config.rollout.max_engine_restarts - self._restarts - waiting

    def abort(self, member: int, request_id: str) -> None:
        """See ``EnginePool``."""
        self._members[member].actor.abort.remote(request_id)

    def describe(self, member: int) -> str:
        """See ``EnginePool``."""
        return self._name(self._members[member].index)

    def restart_dead(self) -> list[str]:
        """Start engines that have left the pool anew; what became of them, one sentence each.

        They serve nothing until ``admit``: first they need the weights of today.

        Raises:
            EngineError: one did not start.
        """
        dead = dict(self._dead)
        for index in dead:
            old = self._engines[index]
            ray.wait([old.stop.remote()], timeout=_STOP_TIMEOUT_S)
            ray.kill(old)
            self._engines[index] = self._new_actor(index)
        names = [self._name(index) for index in dead]
        references = [self._engines[index].start.remote() for index in dead]
        gather(
            references,
            names,
            phase="starting again",
            timeout_s=self._start_timeout_s,
            error=EngineError,
            watch=self._watch,
        )
        self._restarts += len(dead)
        self._restarted += dead
        return [f"{name} was started again ({dead[index]})" for name, index in zip(names, dead, strict=True)]

    def admit(self) -> None:
        """Engines that ``restart_dead`` started have the weights: let them serve."""
        restarted, self._restarted = self._restarted, []
        for index in restarted:
            del self._dead[index]
            self._join(index)

    # --------------------------------------------------------------------------------------------------- generation
    def client(self) -> EngineClient:
        """A client of this pool, without requests."""
        # The engines bound each request themselves; this bound is for an engine that no longer answers at all.
        return EngineClient(self, self._config.rollout.request_timeout_s + 60)

    def generate(self, requests: Sequence[GenerationRequest]) -> list[list[Generation]]:
        """All responses of every request, in the order of the requests.

        Raises:
            EngineError: an engine died, refused, or a request outlived ``rollout.request_timeout_s``.
        """
        client = self.client()
        for request in requests:
            client.submit(request)
        answers: dict[str, list[Generation]] = {}
        while len(client):
            raise_if_interrupted()
            answers |= {request.request_id: found for request, found in client.poll(_POLL_S)}
        return [answers[request.request_id] for request in requests]

    # ------------------------------------------------------------------------------------------------------ weights
    def connect(self, transport: str, rendezvous: dict[str, Any]) -> None:
        self._call("connect", transport, rendezvous, phase="joining the weight transport")

    def begin_update(self, version: int) -> None:
        self._call("begin_update", version, phase="beginning a weight update")

    def start_update(self, buckets: list[BucketMetadata]) -> list[Any]:
        """Let every engine fetch the buckets; returns at once with references for ``wait_update``."""
        return [engine.update.remote(buckets) for engine in self._engines]

    def wait_update(self, references: list[Any]) -> None:
        self._gather(references, phase="loading weights", timeout_s=self._config.sync.timeout_s)

    def finish_update(self, version: int) -> list[UpdateReceipt]:
        return self._call("finish_update", version, phase="finishing a weight update")

    def ask_each(self, requests: Sequence[GenerationRequest]) -> Callable[[], list[list[Generation]]]:
        """The same one-sample requests to every engine, past the registry.

        Returns:
            At once, what waits for the answers: for each request, every engine's.
        """
        phase, timeout = "answering the weight-sync probe", self._config.sync.timeout_s
        asked = [[engine.generate.remote(request) for engine in self._engines] for request in requests]

        def answered() -> list[list[Generation]]:
            answers = [self._gather(references, phase=phase, timeout_s=timeout) for references in asked]
            return [[generations[0] for generations in each] for each in answers]

        return answered

    # -------------------------------------------------------------------------------------------------------- turns
    def sleep(self) -> None:
        self._call("sleep", phase="making room for the trainers")

    def wake(self, parts: Sequence[Literal["weights", "kv_cache"]]) -> None:
        self._call("wake", parts, phase="coming back to the device")

    # ---------------------------------------------------------------------------------------------------------- end
    def shutdown(self, timeout_s: float = 30.0) -> None:
        """Stop every engine and its processes; an unresponsive actor is killed."""
        references = [engine.stop.remote() for engine in self._engines]
        ray.wait(references, num_returns=len(references), timeout=timeout_s)
        for engine in self._engines:
            ray.kill(engine)
        self._engines = []

    # -------------------------------------------------------------------------------------------------------- calls
    def _name(self, engine: int) -> str:
        return f"engine {engine} ({self._config.rollout.engine})"

    def _call(self, method: str, *arguments: Any, phase: str, timeout_s: float | None = None) -> list[Any]:
        references = [getattr(engine, method).remote(*arguments) for engine in self._engines]
        return self._gather(references, phase=phase, timeout_s=timeout_s or self._config.sync.timeout_s)

    def _gather(self, references: list[Any], *, phase: str, timeout_s: float) -> list[Any]:
        names = [self._name(index) for index in range(len(references))]
        return gather(references, names, phase=phase, timeout_s=timeout_s, error=EngineError, watch=self._watch)


def _is_alive(actor: Any) -> bool:
    """Whether an engine says of itself, within a bound, that it lives."""
    try:
        health: EngineHealth = ray.get(actor.health.remote(), timeout=_HEALTH_TIMEOUT_S)
    except RayError:  # a dead actor, or one that does not answer
        return False
    return health.alive
