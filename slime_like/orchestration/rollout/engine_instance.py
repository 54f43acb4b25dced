"""One start of one engine, and the dispatch of requests to all of them."""

import asyncio
import os
import shlex
import time
from bisect import insort
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any, Self

import ray
from ray.exceptions import RayError

from slime_like.config import RunConfig
from slime_like.errors import EngineError
from slime_like.interfaces import EngineHealth, Generation, GenerationRequest, RequestBatch
from slime_like.orchestration.cluster.placement import Placement
from slime_like.orchestration.cluster.ray_calls import fetch
from slime_like.orchestration.rollout.engine_actor import EngineActor, EngineNodeOptions
from slime_like.system.loop_thread import LoopThread
from slime_like.system.spans import add_span

_HEALTH_TIMEOUT_S = 15.0
_THREADS = "OMP_NUM_THREADS"
_TOGETHER_S = 0.002
"""Wait for requests that end with the same token. They end one after the other, within less time."""


@dataclass(eq=False, slots=True)
class EngineInstance:
    """One start of one engine.

    Attributes:
        serves: whether it has the current weights.
        death: the error that revealed its end.
        calls, tokens: what it has to answer.
        last_answer: when one of its requests last ended, or could.
    """

    index: int
    name: str
    actor: Any
    serves: bool = False
    death: EngineError | None = None
    calls: set["EngineCall"] = field(default_factory=set)
    tokens: int = 0
    last_answer: float = field(default_factory=time.monotonic)

    @classmethod
    def launch(cls, config: RunConfig, placement: Placement, index: int, shared_devices: Sequence[str] = ()) -> Self:
        """Create the actors of engine ``index``. They import in the background.

        Args:
            shared_devices: device of every trainer rank, for colocated engines.
        """
        first, *others = [
            _node_options(config, placement, index, node, shared_devices) for node in range(placement.engine_nodes)
        ]
        actor = ray.remote(EngineActor).options(**first.options, max_restarts=0, max_concurrency=10_000)
        name = f"engine {index} ({config.rollout.engine})"
        return cls(index, name, actor.remote(config, index, first.devices, others))

    def is_alive(self) -> bool:
        """Ask the actor, within a bound. Return False without an answer."""
        try:
            health: EngineHealth = ray.get(self.actor.health.remote(), timeout=_HEALTH_TIMEOUT_S)
        except RayError:  # a dead actor, or one that does not answer
            return False
        return health.alive


@dataclass(eq=False, slots=True)
class EngineCall:
    """A request until its answer. All methods run in the event loop.

    Attributes:
        order: number of the request. Requests are sent in this order, also again.
        ended: set when it is answered, or its engine is dead.
        engine: engine that has it; ``None`` while it waits for one with room.
        reference, answer: Ray's reference to the answer, and the answer.
        sent_ns: when it was sent.
    """

    request: GenerationRequest
    order: int
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    engine: EngineInstance | None = None
    reference: Any = None
    answer: Future[list[Generation]] = field(default_factory=Future)
    sent_ns: int = 0

    @property
    def tokens(self) -> int:
        """Largest number of tokens that it needs."""
        request = self.request
        return len(request.prompt.token_ids) + (request.num_samples + request.greedy) * request.sampling.max_new_tokens

    def assign(self, engine: EngineInstance) -> None:
        self.engine = engine
        if not engine.calls:
            engine.last_answer = time.monotonic()
        engine.calls.add(self)
        engine.tokens += self.tokens

    def release(self) -> None:
        """Record that the engine no longer has the call."""
        if self.engine is not None:
            self.engine.calls.remove(self)
            self.engine.tokens -= self.tokens
            self.engine.last_answer = time.monotonic()

    def send(self, engine: EngineInstance, batch: RequestBatch, thread: LoopThread) -> None:
        self.sent_ns = time.perf_counter_ns()
        try:
            self.reference = engine.actor.generate.remote(replace(self.request, batch=batch))
            self.answer = self.reference.future()
        except Exception as error:  # Ray has ended
            self.answer.set_exception(error)
        self.answer.add_done_callback(lambda _: thread.call_soon(self.ended.set))  # in one of Ray's threads

    def result(self, engine: EngineInstance) -> list[Generation]:
        """Return the answer once the call has ended. Raise what ended it, with the engine's name."""
        if not self.answer.done():
            raise engine.death or EngineError("the engine was lost", code="engine-died", who=engine.name)
        if self.reference is not None and self.answer.exception() is not None:
            fetch(self.reference, engine.name, phase="generating", error=EngineError)
        found = self.answer.result()
        versions = [int(version) for each in found for version in each.weight_versions[[0, -1]] if len(each.token_ids)]
        details = {"versions": [min(versions), max(versions)]} if versions else {}
        tokens = sum(len(each.token_ids) for each in found)
        name, ended_ns = self.request.request_id, time.perf_counter_ns()
        add_span(f"engine {engine.index}/requests", name, self.sent_ns, ended_ns, tokens=tokens, **details)
        return found


class Dispatcher:
    """Dispatcher of requests to engines with room. Everything runs in the event loop of ``thread``.

    Args:
        instances: the engines; the owner replaces entries of this list.
        capacity: number of requests that an engine gets at a time.

    Attributes:
        orders: numbers of requests.
    """

    def __init__(self, thread: LoopThread, instances: Sequence[EngineInstance], capacity: int) -> None:
        self._thread = thread
        self._instances = instances
        self._capacity = capacity
        self._waiting: list[EngineCall] = []  # in order
        self._next_send: asyncio.TimerHandle | None = None
        self.orders = count()

    async def serve(self, call: EngineCall) -> EngineInstance:
        """Send a call when there is room, wait until it has ended, and return its engine. Calls that are made together,
        and go to one engine, arrive there as one batch. A cancellation ends the call in the engine."""
        insort(self._waiting, call, key=lambda each: each.order)
        self._send_in(0.0)
        try:
            await call.ended.wait()
        except asyncio.CancelledError:
            if call.engine is None:
                self._waiting.remove(call)
            else:
                ray.cancel(call.reference)
            raise
        finally:
            call.release()
            if self._waiting:
                self._send_in(_TOGETHER_S)
        assert call.engine is not None
        return call.engine

    def _send_in(self, delay_s: float) -> None:
        if self._next_send is None:  # one for all calls of that time
            self._next_send = self._thread.loop.call_later(delay_s, self.send)

    def send(self) -> None:
        """Send requests to engines that have room, in order. Requests to one engine are a batch."""
        self._next_send = None
        batches: dict[EngineInstance, list[EngineCall]] = {}
        while self._waiting and (engine := self.least_loaded()) is not None:
            call = self._waiting.pop(0)
            call.assign(engine)
            batches.setdefault(engine, []).append(call)
        for engine, calls in batches.items():
            for place, call in enumerate(calls):
                call.send(engine, RequestBatch(calls[0].request.request_id, len(calls), place), self._thread)

    def least_loaded(self) -> EngineInstance | None:
        """Return the engine with room and the fewest outstanding tokens; ``None`` if all are full or dead."""
        free = [each for each in self._instances if each.serves and len(each.calls) < self._capacity]
        return min(free, key=lambda each: each.tokens, default=None)


def _node_options(
    config: RunConfig, placement: Placement, index: int, node: int, shared_devices: Sequence[str]
) -> EngineNodeOptions:
    """Return the options of an engine's actor on one of its nodes."""
    ranks = placement.shared_ranks(index, node)
    environment: dict[str, Any] = {"env_vars": {}}
    if placement.device != "GPU" and _THREADS not in os.environ:  # torch reads it on import; Ray would set one thread
        cores = len(os.sched_getaffinity(0)) // placement.ranks_beside_engine(index, node)
        environment["env_vars"] = {_THREADS: str(max(1, cores))}
    if (python := config.rollout.python) is not None:
        environment["py_executable"] = shlex.quote(str(python))  # Ray passes it to a shell
    devices = ",".join(shared_devices[rank] for rank in ranks if shared_devices)
    return EngineNodeOptions({**placement.engine_options(index, node), "runtime_env": environment}, devices)
