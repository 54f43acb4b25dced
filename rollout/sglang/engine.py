"""SGLang behind ``RolloutEngine``: its engine, in separate processes."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rollout.base import EngineBase
from rollout.engine_arguments import check_arguments
from rollout.hooks import MemoryPart
from rollout.sglang.arguments import check_length, environment, gives_memory_back, on_cpu
from slime_like.errors import EngineError
from slime_like.hosting.child_process import ChildProcess, ProcessEnded
from slime_like.interfaces import BucketMetadata, Generation, GenerationRequest, PauseMode
from slime_like.weights.wire import metadata_to_wire

if TYPE_CHECKING:
    from slime_like.config import RunConfig

_MODULE = "rollout.sglang.main"
_END_S = 3.0
"""For SGLang's processes to be gone after they were killed; they have nothing to save."""
_HEALTH_TIMEOUT_S = 10.0


class SglangEngine(EngineBase[ChildProcess]):
    """One SGLang engine of ``config.rollout.tensor`` ranks.

    On a CPU there is no memory to give back: ``sleep`` and ``wake`` change the state only.
    """

    def __init__(self, config: RunConfig, engine_index: int) -> None:
        super().__init__(config, engine_index, "SGLang")
        self._process: ChildProcess | None = None

    async def start(self) -> None:
        """Start SGLang's processes and load the model.

        Raises:
            EngineError: an engine argument is rejected, the start fails, or it takes longer than
                ``rollout.start_timeout_s``.
        """
        check_arguments("sglang", self._config.rollout)
        check_length(self._config, self._dimensions, self._name)
        if self._dimensions.latent is not None and on_cpu():
            raise EngineError(
                f"{self._name}: SGLang on a CPU is not served with latent attention (DeepSeek-V3's); use "
                "rollout.engine=transformers there"
            )
        self._begin_anew()
        timeout = self._config.rollout.start_timeout_s
        process = ChildProcess(sys.executable, _MODULE, lambda scratch: environment(self._config, scratch))
        try:
            await asyncio.wait_for(process.start(self._config, self._index), timeout)
        except BaseException as error:
            await asyncio.to_thread(process.end, _END_S)
            raise _start_error(error, timeout, self._name, self._log) from error
        self._process = process

    async def generate(self, request: GenerationRequest) -> list[Generation]:
        name, answered = request.request_id, False
        async with self._promising(request) as process:
            try:
                samples: list[Generation] = await process.call("generate", request)
                answered = True
                return samples
            except ProcessEnded as error:
                raise EngineError(f"{self._name} died while it ran request {name}; {self._death}") from error
            except EngineError as error:
                answered = True
                raise EngineError(f"request {name} failed on {self._name}: {error}") from error
            finally:
                if not answered and process.alive:  # the caller was cancelled, or gave up
                    process.tell("abort", name)

    async def abort(self, request_id: str | None = None) -> None:
        await self._ask("abort", "abort", request_id)

    async def connect(self, transport: str, rendezvous: dict[str, Any]) -> None:
        """Join the weight transport on every rank, anew if this engine was connected."""
        await self._call_in_sync("connect", "connect", transport, rendezvous)

    async def stop(self) -> None:
        """End SGLang's processes, by process id, within seconds. May be called twice."""
        process, self._process = self._process, None
        if process is not None:
            await asyncio.to_thread(process.end, _END_S)

    # ------------------------------------------------------------------------------------------------- see EngineHooks
    def _alive(self) -> ChildProcess:
        if self._process is None:
            raise EngineError(f"{self._name} is not running; call start first")
        if not self._process.alive:
            raise EngineError(f"{self._name}: its process has died; {self._death}")
        return self._process

    async def _is_alive(self) -> bool:
        """Asks the schedulers, not only SGLang's own process."""
        if self._process is None or not self._process.alive:
            return False
        try:
            await asyncio.wait_for(self._process.call("ping"), _HEALTH_TIMEOUT_S)
        except Exception:  # whatever a dead or hung process answers, the answer to "alive?" is no
            return False
        return True

    def _own_process_ids(self) -> tuple[int, ...]:
        return self._process.process_ids if self._process is not None else ()

    async def _freeze(self, mode: PauseMode) -> None:
        await self._ask(f"pause({mode})", "pause", mode)

    async def _thaw(self) -> None:
        await self._ask("resume", "resume")

    async def _begin_update(self) -> None:
        await self._call_in_sync("begin_update", "begin_update")

    async def _update(self, bucket: BucketMetadata) -> None:
        await self._call_in_sync("update", "update", metadata_to_wire(bucket))

    async def _received(self) -> tuple[dict[str, int], float]:
        checksums, hash_s = await self._call_in_sync("finish_update", "received")
        return checksums, hash_s

    async def _finish_update(self, version: int) -> None:
        await self._call_in_sync("finish_update", "finish_update", version)

    async def _close_update(self) -> None:
        await self._call_in_sync("closing a failed update", "close_update")

    async def _give_memory_back(self, parts: Sequence[MemoryPart]) -> None:
        if gives_memory_back(self._config, self._name):
            await self._ask("sleep", "release_memory", tuple(reversed(parts)))

    async def _take_memory(self, parts: Sequence[MemoryPart]) -> None:
        if gives_memory_back(self._config, self._name):
            await self._ask("wake", "resume_memory", tuple(parts))

    # -------------------------------------------------------------------------------------------------------- helpers
    async def _ask(self, phase: str, method: str, *arguments: Any) -> Any:
        """Call a method of the process; errors name the engine and the phase."""
        try:
            return await self._bounded(phase, self._alive().call(method, *arguments))
        except ProcessEnded as error:
            raise EngineError(f"{self._name} died during {phase}; {self._death}") from error
        except EngineError as error:
            if str(error).startswith(self._name):
                raise
            raise EngineError(f"{self._name}: {phase} failed: {error}") from error

    async def _call_in_sync(self, phase: str, method: str, *arguments: Any) -> Any:
        """Call a method of the process, as ``_sync_call`` does."""
        process = self._alive()

        async def call() -> Any:
            try:
                return await process.call(method, *arguments)
            except ProcessEnded as error:
                raise EngineError(f"its process has died; {self._death}") from error

        return await self._sync_call(phase, call())


def _start_error(error: BaseException, timeout_s: float, name: str, log: str) -> BaseException:
    if isinstance(error, TimeoutError):
        return EngineError(f"{name} did not start within rollout.start_timeout_s={timeout_s:g} s")
    if isinstance(error, ProcessEnded):
        return EngineError(f"{name} did not start: its process ended; {log}")
    if isinstance(error, EngineError):
        return EngineError(f"{name} did not start: {error}; {log}")
    return error
