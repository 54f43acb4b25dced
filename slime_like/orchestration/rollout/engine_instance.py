"""One start of one engine: its actor, and the requests that it has to answer."""

import asyncio
import os
import shlex
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Self

import ray
from ray.exceptions import RayError

from slime_like.config import RunConfig
from slime_like.errors import EngineError
from slime_like.interfaces import EngineHealth, Generation, GenerationRequest, RequestBatch
from slime_like.orchestration.cluster.placement import Placement
from slime_like.orchestration.cluster.ray_calls import fetch
from slime_like.orchestration.rollout.engine_actor import EngineActor, EngineNodeOptions

_HEALTH_TIMEOUT_S = 15.0
_THREADS = "OMP_NUM_THREADS"


@dataclass(eq=False, slots=True)
class EngineInstance:
    """One start of one engine.

    Attributes:
        serves: whether it has the current weights.
        death: the error that revealed its end.
        calls, tokens: what it has to answer.
    """

    index: int
    name: str
    actor: Any
    serves: bool = False
    death: EngineError | None = None
    calls: set["EngineCall"] = field(default_factory=set)
    tokens: int = 0

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
    """

    request: GenerationRequest
    order: int
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    engine: EngineInstance | None = None
    reference: Any = None
    answer: Future[list[Generation]] = field(default_factory=Future)

    @property
    def tokens(self) -> int:
        """Largest number of tokens that it needs."""
        request = self.request
        return len(request.prompt.token_ids) + (request.num_samples + request.greedy) * request.sampling.max_new_tokens

    def assign(self, engine: EngineInstance) -> None:
        self.engine = engine
        engine.calls.add(self)
        engine.tokens += self.tokens

    def release(self) -> None:
        """Record that the engine no longer has the call."""
        if self.engine is not None:
            self.engine.calls.remove(self)
            self.engine.tokens -= self.tokens

    def send(self, engine: EngineInstance, batch: RequestBatch) -> None:
        loop = asyncio.get_running_loop()

        def end(_: object) -> None:  # in one of Ray's threads
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(self.ended.set)

        try:
            self.reference = engine.actor.generate.remote(replace(self.request, batch=batch))
            self.answer = self.reference.future()
        except Exception as error:  # Ray has ended
            self.answer.set_exception(error)
        self.answer.add_done_callback(end)

    def result(self, engine: EngineInstance) -> list[Generation]:
        """Return the answer once the call has ended. Raise what ended it, with the engine's name."""
        if not self.answer.done():
            raise engine.death or EngineError("the engine was lost", code="engine-died", who=engine.name)
        if self.reference is not None and self.answer.exception() is not None:
            fetch(self.reference, engine.name, phase="generating", error=EngineError)
        return self.answer.result()


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
