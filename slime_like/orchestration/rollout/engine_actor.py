"""The Ray actor of one rollout engine."""

import asyncio
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, Literal

from slime_like.config import RunConfig
from slime_like.data.tokenizer import load_tokenizer
from slime_like.errors import EngineError
from slime_like.interfaces import (
    BucketMetadata,
    EngineHealth,
    Generation,
    GenerationRequest,
    Manifest,
    RolloutEngine,
    UpdateReceipt,
)
from slime_like.interfaces.engine import load_engine
from slime_like.orchestration.cluster.node import (
    require_own_devices,
    use_cluster_interface,
    use_log,
    use_session_directory,
)
from slime_like.orchestration.rollout.agents import AgentRollouts
from slime_like.orchestration.rollout.conversations import Conversations
from slime_like.orchestration.rollout.requests import require_routes, routes_per_token


class EngineActor:
    """One engine, and the conversations or agents that it samples for.

    Its methods are coroutines, so Ray makes it an asynchronous actor.

    Requests that arrive during a weight update wait until it finishes or fails. The next turn of a conversation may
    arrive at any time.
    """

    def __init__(self, config: RunConfig, index: int, shared_devices: str = "") -> None:
        self._logs = use_log(f"engine-{index}")
        if shared_devices:  # Ray assigns no device to a colocated engine; CUDA is not initialized yet
            os.environ["CUDA_VISIBLE_DEVICES"] = shared_devices
        require_own_devices()
        use_cluster_interface(gloo=False)  # weights come from other hosts
        use_session_directory()
        self._config = config
        self._index = index
        self._engine: RolloutEngine = load_engine(config.rollout.engine)(config, index)
        self._routes = routes_per_token(config.algorithm, config.model)
        self._conversations: Conversations | AgentRollouts | None = None
        self._updated = asyncio.Event()
        self._updated.set()

    async def start(self) -> None:
        """Start the engine, then the workers of the environment or agent. The caller bounds the wait."""
        await self._engine.start()
        config, index = self._config, self._index
        if not (config.rollout.environment.name is not None or config.rollout.agent.is_set):
            return
        tokenizer = await asyncio.to_thread(load_tokenizer, config.model.path, config.model.trust_remote_code)
        if config.rollout.agent.is_set:
            logs = self._logs, f"agent-{index}"
            self._conversations = AgentRollouts(config, tokenizer, self._sample, self._version, logs)
        else:
            logs = self._logs, f"environment-{index}"
            self._conversations = Conversations(config, tokenizer, self._sample, logs)
        await self._conversations.start()

    async def _version(self) -> int:
        return (await self._engine.health()).weight_version

    async def generate(self, request: GenerationRequest) -> list[Generation]:
        """Sample a request. With a task, it becomes conversations with the environment, or rollouts of the agent.

        A canceled call ends what it started.
        """
        talks = self._conversations if request.task is not None else None
        answer = self._sample(request) if talks is None else talks.run(request)
        if isinstance(talks, AgentRollouts):  # they have their own limits, and wait for workers
            return await answer
        timeout = self._config.request_timeout_s
        try:
            return await asyncio.wait_for(answer, timeout)
        except TimeoutError as error:
            raise EngineError(
                f"{request.request_id} was not answered within {timeout:.0f} s",
                code="request-timeout",
                remedy="raise rollout.request_timeout_s, or lower rollout.max_concurrent_requests",
            ) from error

    async def _sample(self, request: GenerationRequest) -> list[Generation]:
        await self._updated.wait()  # the request's own timeout bounds this
        generations = await self._engine.generate(request)
        if self._routes is not None and request.sampling.training:
            require_routes(generations, request, self._routes, self._config.rollout.engine)
        return generations

    async def connect(self, transport: str, rendezvous: dict[str, Any]) -> None:
        await self._engine.connect(transport, rendezvous)

    async def begin_update(self, version: int, *parts: Manifest | None) -> None:
        self._updated.clear()
        async with self._opened_by_failure():
            await self._engine.begin_update(version, Manifest.joined(parts))

    async def update(self, buckets: Sequence[BucketMetadata], *before: None) -> None:
        async with self._opened_by_failure():
            for bucket in buckets:
                await self._engine.update(bucket)

    async def finish_update(self, version: int, *before: None) -> UpdateReceipt:
        async with self._opened_by_failure():
            receipt = await self._engine.finish_update(version)
        self._updated.set()
        return receipt

    @asynccontextmanager
    async def _opened_by_failure(self) -> AsyncIterator[None]:
        """Open the gate after a failed update. The engine then rejects requests with the reason."""
        try:
            yield
        except BaseException:
            self._updated.set()
            raise

    async def sleep(self, keep_weights: bool) -> None:
        await self._engine.sleep(keep_weights)

    async def wake(self, parts: Sequence[Literal["weights", "kv_cache"]]) -> None:
        await self._engine.wake(parts)

    async def health(self) -> EngineHealth:
        return await self._engine.health()

    async def stop(self) -> None:
        if self._conversations is not None:
            await self._conversations.close()
        await self._engine.stop()
