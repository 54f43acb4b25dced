"""The Ray actor around one rollout engine: a thin, asynchronous doorway."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from typing import Any, Literal

from slime_like.config import RunConfig
from slime_like.errors import EngineError
from slime_like.interfaces import (
    BucketMetadata,
    EngineHealth,
    Generation,
    GenerationRequest,
    UpdateReceipt,
)
from slime_like.orchestration.plugins import load_engine


class EngineActor:
    """One engine. Plain Python with coroutines: Ray makes an asynchronous actor of it."""

    def __init__(self, config: RunConfig, index: int, shared_devices: str = "") -> None:
        if shared_devices:  # Ray gave a colocated engine no device of its own; CUDA is not initialised yet
            os.environ["CUDA_VISIBLE_DEVICES"] = shared_devices
        self._config = config
        self._index = index
        self._engine = load_engine(config.rollout.engine)(config, index)

    async def start(self) -> None:
        timeout = self._config.rollout.start_timeout_s
        try:
            await asyncio.wait_for(self._engine.start(), timeout)
        except TimeoutError as error:
            raise EngineError(
                f"engine {self._index} ({self._config.rollout.engine}) did not start within {timeout:.0f} s; "
                "raise rollout.start_timeout_s or read its log in the run directory"
            ) from error

    async def generate(self, request: GenerationRequest) -> list[Generation]:
        return await asyncio.wait_for(self._engine.generate(request), self._config.rollout.request_timeout_s)

    async def abort(self, request_id: str) -> None:
        await self._engine.abort(request_id)

    async def connect(self, transport: str, rendezvous: dict[str, Any]) -> None:
        await self._engine.connect(transport, rendezvous)

    async def begin_update(self, version: int) -> None:
        await self._engine.begin_update(version)

    async def update(self, buckets: Sequence[BucketMetadata]) -> None:
        for bucket in buckets:
            await self._engine.update(bucket)

    async def finish_update(self, version: int) -> UpdateReceipt:
        return await self._engine.finish_update(version)

    async def sleep(self) -> None:
        await self._engine.sleep()

    async def wake(self, parts: Sequence[Literal["weights", "kv_cache"]]) -> None:
        await self._engine.wake(parts)

    async def health(self) -> EngineHealth:
        return await self._engine.health()

    async def stop(self) -> None:
        await self._engine.stop()
