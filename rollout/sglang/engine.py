"""SGLang behind ``RolloutEngine``: its engine, in separate processes."""

import asyncio
import sys
from collections.abc import Sequence
from typing import Any

from rollout.arguments import check_arguments, gives_memory_back, on_cpu
from rollout.base import EngineBase, answers
from rollout.hooks import MemoryPart
from rollout.sglang.arguments import SLEEP_ARGUMENT, environment
from slime_like.config import RunConfig
from slime_like.errors import EngineError
from slime_like.hosting.child_process import ChildProcess, ProcessEnded
from slime_like.interfaces import BucketMetadata, Generation, GenerationRequest, PauseMode
from slime_like.weights.wire import metadata_to_wire

_MODULE = "rollout.sglang.main"
_END_S = 3.0
"""For SGLang's processes to be gone after they were killed; they have nothing to save."""


class SglangEngine(EngineBase[ChildProcess]):
    """One SGLang engine of ``config.rollout.tensor`` ranks.

    On a CPU there is no memory to give back: ``sleep`` and ``wake`` change the state only.
    """

    def __init__(self, config: RunConfig, engine_index: int) -> None:
        super().__init__(config, engine_index, "SGLang")
        self._process: ChildProcess | None = None

    async def _start(self) -> None:
        check_arguments("sglang", self._config)
        longest, limit = self._config.max_model_len, self._dimensions.max_position_embeddings
        if longest > limit:
            problem = f"rollout.max_model_len={longest} is more than the model's max_position_embeddings={limit}"
            raise self._faults.start_failed(problem, "use at most that")
        if self._dimensions.latent is not None and on_cpu():
            raise EngineError(
                "SGLang on a CPU is not served with latent attention (DeepSeek-V3's)",
                code="model-not-served",
                who=self._name,
                remedy="use rollout.engine=transformers there",
            )
        self._process = ChildProcess(sys.executable, _MODULE, lambda scratch: environment(self._config, scratch))
        try:
            await self._process.start(self._config, self._index)
        except ProcessEnded as error:
            raise self._faults.start_failed("its process ended", self._faults.log) from error
        except EngineError as error:
            raise self._faults.start_failed(str(error), self._faults.log) from error

    async def generate(self, request: GenerationRequest) -> list[Generation]:
        async with self._promising(request) as process:
            try:
                return await process.generate(request)
            except ProcessEnded as error:
                raise self._faults.died(f"while it ran request {request.request_id}") from error
            except EngineError as error:
                problem = f"request {request.request_id} failed on {self._name}: {error}"
                raise EngineError(problem, code="request-failed") from error

    async def abort(self, request_id: str | None = None) -> None:
        await self._ask("abort", "abort", request_id)

    async def connect(self, transport: str, rendezvous: dict[str, Any]) -> None:
        """Join the weight transport on every rank, again if this engine was connected."""
        await self._call_in_sync("connect", "connect", transport, rendezvous)

    async def stop(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            await asyncio.to_thread(process.end, _END_S)

    # ------------------------------------------------------------------------------------------------- see EngineHooks
    def _alive(self) -> ChildProcess:
        if self._process is None:
            raise self._faults.not_running()
        if not self._process.alive:
            raise self._faults.died()
        return self._process

    async def _is_alive(self) -> bool:
        """Asks the schedulers, not only SGLang's own process."""
        return self._process is not None and await answers(self._process.call("ping"))

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
        if gives_memory_back(self._config, SLEEP_ARGUMENT, self._name):
            await self._ask("sleep", "release_memory", tuple(reversed(parts)))

    async def _take_memory(self, parts: Sequence[MemoryPart]) -> None:
        if gives_memory_back(self._config, SLEEP_ARGUMENT, self._name):
            await self._ask("wake", "resume_memory", tuple(parts))

    # -------------------------------------------------------------------------------------------------------- helpers
    async def _ask(self, phase: str, method: str, *arguments: Any) -> Any:
        """Call a method of the process; errors name the engine and the phase."""
        process = self._alive()

        async def call() -> Any:
            try:
                return await process.call(method, *arguments)
            except ProcessEnded as error:
                raise self._faults.died(f"during {phase}") from error
            except EngineError as error:
                raise EngineError(f"{phase} failed: {error}", code="engine-call-failed", who=self._name) from error

        return await self._bounded(phase, call())

    async def _call_in_sync(self, phase: str, method: str, *arguments: Any) -> Any:
        """Call a method of the process, as ``_sync_call`` does."""
        process = self._alive()

        async def call() -> Any:
            try:
                return await process.call(method, *arguments)
            except ProcessEnded as error:
                raise self._faults.died() from error

        return await self._sync_call(phase, call())
