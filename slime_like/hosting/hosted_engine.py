"""A rollout engine in another interpreter (``rollout.python``), with the usual ``RolloutEngine`` interface."""

import asyncio
import dataclasses
import os
from collections.abc import Awaitable, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

from slime_like.config import RunConfig
from slime_like.errors import EngineError
from slime_like.hosting.child_process import ChildProcess, ProcessEnded
from slime_like.hosting.faults import EngineFaults
from slime_like.interfaces import BucketMetadata, EngineHealth, Generation, GenerationRequest, PauseMode, UpdateReceipt

_MODULE = "slime_like.hosting.main"
_END_S = 5.0
_HEALTH_TIMEOUT_S = 15.0
_SLACK_S = 15.0
"""Extra time before the owner gives up on the process. The engine bounds every call itself, with a better message."""
_SAMPLING_CALLS = frozenset({"generate", "pause", "resume", "sleep", "wake"})
"""Calls bounded by ``rollout.request_timeout_s``. ``sync.timeout_s`` bounds all others."""

T = TypeVar("T")


class HostedEngine:
    """Engine proxy that forwards every call to the engine's own class in a process of the other interpreter.

    The interpreter needs the engine and the light part of this very package version. The process ends with its owner.
    """

    def __init__(self, config: RunConfig, engine_index: int) -> None:
        self._config = config
        self._index = engine_index
        name = f"engine {engine_index} ({config.rollout.engine} in {config.rollout.python})"
        self._faults = EngineFaults(name, config.run_dir)
        self._process: ChildProcess | None = None
        self._version = 0

    async def start(self) -> None:
        timeout = self._config.engine_start_timeout_s
        process = self._process = ChildProcess(str(self._config.rollout.python), _MODULE, _environment)
        try:
            async with asyncio.timeout(timeout):
                await process.start(self._config.model_dump(mode="json"), self._index)
                await process.call("start")
        except BaseException as error:
            await self._end()
            if isinstance(error, TimeoutError):
                raise self._faults.start_timeout(timeout, self._faults.log) from error
            if isinstance(error, ProcessEnded):
                raise self._faults.start_failed("its process ended", self._faults.log) from error
            raise
        process.note_processes()
        self._version = 0

    async def generate(self, request: GenerationRequest) -> list[Generation]:
        return await self._bounded("generate", self._running().generate(request))

    async def abort(self, request_id: str | None = None) -> None:
        await self._call("abort", request_id)

    async def pause(self, mode: PauseMode = "keep") -> None:
        await self._call("pause", mode)

    async def resume(self) -> None:
        await self._call("resume")

    async def connect(self, transport: str, rendezvous: dict[str, Any]) -> None:
        await self._call("connect", transport, rendezvous)

    async def begin_update(self, version: int) -> None:
        await self._call("begin_update", version)

    async def update(self, bucket: BucketMetadata) -> None:
        await self._call("update", bucket)

    async def finish_update(self, version: int) -> UpdateReceipt:
        receipt: UpdateReceipt = await self._call("finish_update", version)
        self._version = receipt.version
        return receipt

    async def checksums(self) -> dict[str, int]:
        received: dict[str, int] = await self._call("checksums")
        return received

    async def health(self) -> EngineHealth:
        """Return the engine's health. An engine whose process does not answer is dead."""
        process = self._process
        if process is None:
            return EngineHealth(False, self._version, 0, 0)
        try:
            found: EngineHealth = await asyncio.wait_for(process.call("health"), _HEALTH_TIMEOUT_S)
        except Exception:  # any failure means that the engine is not alive
            return EngineHealth(False, self._version, 0, 0, process.process_ids)
        ids = tuple(dict.fromkeys((*process.process_ids, *found.process_ids)))
        return dataclasses.replace(found, process_ids=ids)

    async def sleep(self, keep_weights: bool = True) -> None:
        await self._call("sleep", keep_weights)

    async def wake(self, parts: Sequence[Literal["weights", "kv_cache"]]) -> None:
        await self._call("wake", tuple(parts))

    async def stop(self) -> None:
        """Stop the engine in good order, then end its process by id. May be called twice."""
        try:
            if self._process is not None and self._process.alive:
                await self._call("stop")
        finally:
            await self._end()

    async def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            await asyncio.to_thread(process.end, _END_S)

    def _running(self) -> ChildProcess:
        if self._process is None:
            raise self._faults.not_running()
        return self._process

    async def _call(self, method: str, *arguments: Any) -> Any:
        return await self._bounded(method, self._running().call(method, *arguments))

    async def _bounded(self, method: str, call: Awaitable[T]) -> T:
        timeout = self._config.request_timeout_s if method in _SAMPLING_CALLS else self._config.sync.timeout_s
        try:
            return await asyncio.wait_for(call, timeout + _SLACK_S)
        except TimeoutError as error:
            problem = f"{self._faults.name} gave no answer to {method} within {timeout + _SLACK_S:g} s"
            raise EngineError(problem, code="engine-timeout") from error
        except ProcessEnded as error:
            problem = f"{self._faults.name} died, at the latest during {method}"
            raise EngineError(problem, code="engine-died", remedy=self._faults.log) from error


def _environment(scratch: Path) -> dict[str, str]:
    """Copy this environment without the variables that redirect another interpreter."""
    return {name: value for name, value in os.environ.items() if name not in ("PYTHONHOME", "VIRTUAL_ENV")}
