"""The Ray actor of one rollout engine."""

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

import ray

from slime_like.config import RunConfig
from slime_like.errors import EngineError
from slime_like.hosting.faults import one_line
from slime_like.interfaces import (
    BucketMetadata,
    EngineHealth,
    Generation,
    GenerationRequest,
    Manifest,
    RolloutEngine,
    UpdateReceipt,
)
from slime_like.interfaces.engine import WHOLE, EngineNode, load_engine
from slime_like.models.tokenization import load_tokenizer
from slime_like.orchestration.cluster.node import (
    node_address,
    require_own_devices,
    use_cluster_interface,
    use_log,
    use_session_directory,
)
from slime_like.orchestration.rollout.requests import all_or_none, parts_of, require_routes, routes_per_token, turn_form
from slime_like.plugins.options import load_option
from slime_like.system import heartbeat
from slime_like.system.processes import end_processes
from slime_like.system.spans import Spans, take_spans

_Answer = TypeVar("_Answer")


@dataclass(frozen=True, slots=True)
class EngineNodeOptions:
    """Ray's options of an actor on one of an engine's nodes, and the devices that a colocated one shares."""

    options: dict[str, Any]
    devices: str


class UpdateGate:
    """Gate that is closed during weight updates. Requests wait at it, and their time limits stand still.

    While it is open and the engine has requests, the actor's heartbeat is in the phase "generate".

    A failed update leaves it closed: the driver ends the run, or replaces an engine and sends all weights again.

    Args:
        limit_s: time limit of a request.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._left: dict[asyncio.Timeout, float] = {}  # seconds of each running limit; current only while closed
        self._opened = asyncio.Event()
        self._opened.set()
        self._sampling, self._phase = 0, ExitStack()

    def close(self) -> None:
        if self._opened.is_set():
            self._opened.clear()
            self._phase.close()
            now = asyncio.get_running_loop().time()
            for clock in self._running():
                self._left[clock] = (clock.when() or now) - now
                clock.reschedule(None)

    def open(self) -> None:
        if not self._opened.is_set():
            self._opened.set()
            if self._sampling:
                self._phase.enter_context(heartbeat.phase("generate"))
            now = asyncio.get_running_loop().time()
            for clock in self._running():
                clock.reschedule(now + self._left[clock])

    def _running(self) -> list[asyncio.Timeout]:
        return [clock for clock in self._left if not clock.expired()]

    async def passed(self) -> None:
        """Wait until the gate is open."""
        await self._opened.wait()

    async def sample(self, answer: Awaitable[_Answer]) -> _Answer:
        """Await a request that the engine has received through the open gate."""
        self._sampling += 1
        if self._sampling == 1 and self._opened.is_set():
            self._phase.enter_context(heartbeat.phase("generate"))
        try:
            return await answer
        finally:
            heartbeat.beat()
            self._sampling -= 1
            if not self._sampling:
                self._phase.close()

    @asynccontextmanager
    async def limit(self, request: str) -> AsyncIterator[None]:
        """Bound the block, without the time for which the gate is closed. Raises ``EngineError``."""
        clock = asyncio.timeout(self._limit_s if self._opened.is_set() else None)
        try:
            async with clock:
                self._left[clock] = self._limit_s
                yield
        except TimeoutError as error:
            raise EngineError(
                f"{request} was not answered within {self._limit_s:g} s",
                code="request-timeout",
                remedy="raise rollout.request_timeout_s, or lower rollout.max_concurrent_requests",
            ) from error
        finally:
            self._left.pop(clock, None)


class EngineActor:
    """One engine, and the conversations or agents that it samples for.

    Its methods are coroutines, so Ray makes it an asynchronous actor.

    Requests that arrive during a weight update wait at a gate. The next turn of a conversation may arrive at any time.
    """

    def __init__(
        self, config: RunConfig, index: int, shared_devices: str = "", others: Sequence[EngineNodeOptions] = ()
    ) -> None:
        self._logs = _settle(role := f"engine-{index}", shared_devices)
        self._config = config
        self._index = index
        load: Callable[..., RolloutEngine] = partial(load_engine(config.rollout.engine), config, index)
        self._further = [
            ray.remote(EngineNodeActor).options(**other.options).remote(load, n, f"{role}-node-{n}", other.devices)
            for n, other in enumerate(others, start=1)
        ]
        self._part = WHOLE
        if others:
            address = node_address()
            self._store, port = load_option("engine-store")(address, "", config.engine_start_timeout_s)
            self._part = EngineNode(0, 1 + len(others), address, address, port)
        self._engine = load(self._part) if others else load()
        self._watching: asyncio.Task[None] | None = None
        self._routes = routes_per_token(config.algorithm, config.model)
        self._conversations: Any = None  # ``Conversations`` or ``AgentRollouts``
        self._gate = UpdateGate(config.request_timeout_s)

    async def start(self) -> None:
        """Start the engine, then the workers of the environment or agent. The caller bounds the wait."""
        self._ticking = asyncio.create_task(_tick())
        await self._start_parts()
        config, index = self._config, self._index
        if not (config.rollout.environment.name is not None or config.rollout.agent.is_set):
            return
        tokenizer = await asyncio.to_thread(load_tokenizer, config.model.path, config.model.trust_remote_code)
        if config.rollout.agent.is_set:
            logs = self._logs, f"agent-{index}"
            self._conversations = load_option("agent")(config, tokenizer, self._sample, self._version, logs)
        else:
            logs = self._logs, f"environment-{index}"
            form = turn_form(config.data, config.rollout.agent, tokenizer)
            self._conversations = load_option("environment")(config.rollout.environment, form, self._sample, logs)
        await self._conversations.start()

    async def _start_parts(self) -> None:
        """Start the ranks on all nodes, which wait for each other. When a node's ranks end, the start fails."""
        own = asyncio.ensure_future(self._engine.start())
        further = [asyncio.ensure_future(actor.run.remote(self._part)) for actor in self._further]
        await asyncio.wait({own, *further}, return_when=asyncio.FIRST_COMPLETED)
        if not own.done():
            own.cancel()
            raise next(self._failure(part) for part in further if part.done())
        await own
        if further:
            self._watching = asyncio.create_task(self._end_with(further))

    async def _end_with(self, further: Sequence[asyncio.Future[None]]) -> None:
        """Kill the engine's processes on this node once another node's have ended, so that pending requests fail."""
        done, _ = await asyncio.wait(further, return_when=asyncio.FIRST_COMPLETED)
        print(*map(self._failure, done), file=sys.stderr, flush=True)
        processes = (await self._engine.health()).process_ids
        await asyncio.to_thread(end_processes, processes, 0.0)

    def _failure(self, part: asyncio.Future[None]) -> EngineError:
        """Return why the ranks on a further node have ended."""
        error = part.exception()
        cause = getattr(error, "cause", None) or error
        problem = "its ranks on another node ended" + (f": {one_line(cause)}" if cause else "")
        return EngineError(problem, code="engine-part-ended", who=f"engine {self._index}")

    async def _version(self) -> int:
        return (await self._engine.health()).weight_version

    async def generate(self, request: GenerationRequest) -> list[Generation]:
        """Sample a request. With a task, it becomes conversations with the environment, or rollouts of the agent.

        A canceled call ends what it started.
        """
        talks = self._conversations if request.task is not None else None
        run = self._sample if talks is None else talks.run
        answer = all_or_none([run(part) for part in parts_of(request)])
        if talks is not None and not self._config.rollout.agent.is_set:  # an agent has its own limit
            async with self._gate.limit(request.request_id):
                return [each for part in await answer for each in part]
        return [each for part in await answer for each in part]

    async def _sample(self, request: GenerationRequest) -> list[Generation]:
        async with self._gate.limit(request.request_id):
            await self._gate.passed()
            generations = await self._gate.sample(self._engine.generate(request))
        if self._routes is not None and request.sampling.training:
            require_routes(generations, request, self._routes, self._config.rollout.engine)
        return generations

    async def connect(self, transport: str, rendezvous: dict[str, Any]) -> None:
        with heartbeat.phase("connect"):
            await self._engine.connect(transport, rendezvous)

    async def begin_update(self, version: int, *parts: Manifest | None) -> None:
        self._gate.close()
        with heartbeat.phase("begin_update"):
            await self._engine.begin_update(version, Manifest.joined(parts))

    async def update(self, buckets: Sequence[BucketMetadata], *before: None) -> None:
        for bucket in buckets:
            with heartbeat.phase("update"):
                await self._engine.update(bucket)

    async def finish_update(self, version: int, *before: None) -> UpdateReceipt:
        with heartbeat.phase("finish_update"):
            receipt = await self._engine.finish_update(version)
        self._gate.open()
        return receipt

    async def sleep(self, keep_weights: bool) -> None:
        with heartbeat.phase("sleep"):
            await self._engine.sleep(keep_weights)

    async def wake(self, parts: Sequence[Literal["weights", "kv_cache"]]) -> None:
        with heartbeat.phase("wake"):
            await self._engine.wake(parts)

    async def profile(self, path: str | None, memory: bool) -> None:
        """Start to trace the engine's ranks, or, with a ``path``, write their traces there."""
        profile: Callable[..., Any] | None = getattr(self._engine, "profile", None)
        if profile is None:
            problem = f"rollout.engine={self._config.rollout.engine} has no method profile"
            raise EngineError(problem, code="engine-not-profiled", remedy="set profile.engines to []")
        await profile(path, memory)

    async def take_spans(self) -> Spans:
        return take_spans()

    async def health(self) -> EngineHealth:
        return await self._engine.health()

    async def stop(self) -> None:
        if self._conversations is not None:
            await self._conversations.close()
        if self._watching is not None:
            self._watching.cancel()
        ends = [self._engine.stop(), *(actor.stop.remote() for actor in self._further)]
        await asyncio.gather(*ends, return_exceptions=True)  # a part may be dead


class EngineNodeActor:
    """Actor of an engine's ranks on a further node. The ``EngineActor`` owns it, so Ray ends it with that actor."""

    def __init__(self, load: Callable[..., RolloutEngine], number: int, role: str, shared_devices: str) -> None:
        _settle(role, shared_devices)
        self._engine: RolloutEngine | None = None
        self._load, self._number = load, number

    async def run(self, first: EngineNode) -> None:
        """Start the ranks, and return when they have ended."""
        self._engine = self._load(replace(first, number=self._number, address=node_address()))
        await self._engine.start()
        while (await self._engine.health()).alive:
            heartbeat.tick()
            await asyncio.sleep(heartbeat.TICK_EVERY_S)

    async def stop(self) -> None:
        if self._engine is not None:
            await self._engine.stop()


async def _tick() -> None:
    """Show that this process's event loop runs."""
    while True:
        heartbeat.tick()
        await asyncio.sleep(heartbeat.TICK_EVERY_S)


def _settle(role: str, shared_devices: str) -> Path:
    """Use the devices, network, directories and log of an engine's actor. Return the directory of logs."""
    logs = use_log(role)
    if shared_devices:  # Ray assigns no device to a colocated engine; CUDA is not initialized yet
        os.environ["CUDA_VISIBLE_DEVICES"] = shared_devices
    require_own_devices()
    use_cluster_interface(gloo=False)  # weights come from other hosts
    use_session_directory()
    return logs
