"""SGLang, in separate processes."""

import asyncio
import os
from collections.abc import Sequence
from typing import Any

from rollout.base import EngineBase, MemoryPart
from rollout.limits import on_cpu
from rollout.sglang.arguments import SLEEP_ARGUMENT, environment, memory_saver_problem
from rollout.sglang.limits import LIMITS, WEIGHTS_BACKUP
from slime_like.config import RunConfig
from slime_like.errors import EngineError
from slime_like.hosting.process import ChildProcess, ProcessEnded
from slime_like.interfaces import BucketMetadata, Generation, GenerationRequest, PauseMode
from slime_like.interfaces.engine import WHOLE, EngineNode
from slime_like.models.dimensions import ModelDimensions

_MODULE = "rollout.sglang.main"
_END_S = 3.0
"""Time for SGLang's processes to be gone after they were killed. They have nothing to save."""


class SglangEngine(EngineBase[ChildProcess]):
    """One SGLang engine, or its ``part``, with ``config.rollout.tensor`` ranks in all.

    On a CPU, ``sleep`` and ``wake`` release no memory.
    """

    limits = LIMITS
    sleep_argument = SLEEP_ARGUMENT
    serve_adapter = "sglang.scheduler:serve_adapter"
    returns_supports = True
    returns_routes = True

    def __init__(self, config: RunConfig, engine_index: int, part: EngineNode = WHOLE) -> None:
        super().__init__(config, engine_index, "SGLang", part)
        self._process: ChildProcess | None = None

    @staticmethod
    def refusal(dimensions: ModelDimensions, on_cuda: bool) -> str | None:
        """Return the reason why such a model cannot be served on these devices, or ``None``."""
        if dimensions.attention.linear is not None and not on_cuda:
            return "SGLang has no gated delta nets for a CPU; use rollout.engine=transformers, or vllm in bfloat16"
        return None

    async def _start(self) -> None:
        rollout, cluster = self._config.rollout, self._config.cluster
        if not on_cpu() and (unsupported := memory_saver_problem(rollout, cluster, os.environ)):
            raise self._faults.start_failed(unsupported, "unset it")
        self._process = ChildProcess(_MODULE, lambda scratch: environment(rollout, scratch, self._part))
        try:
            await self._process.start(self._config, self._index, self._part)
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

    async def _ping(self) -> None:
        """Wait for an answer of the schedulers. Their process on a further node ends with them."""
        process = self._alive()
        if self._part.number == 0:
            await process.call("ping")

    def _own_process_ids(self) -> tuple[int, ...]:
        return self._process.process_ids if self._process is not None else ()

    async def _freeze(self, mode: PauseMode) -> None:
        await self._call("pause", mode, during=f"pause({mode})")

    async def _thaw(self) -> None:
        await self._call("resume", during="resume")

    async def _receive(self, method: str, *arguments: Any) -> list[Any]:
        found: list[Any] = await self._call("receive", method, *arguments)
        return found

    async def _begin_update(self) -> None:
        await self._call("begin_update")

    async def _update(self, bucket: BucketMetadata) -> None:
        await self._receive("sglang.scheduler:load", bucket.to_wire())

    async def _finish_update(self, version: int) -> None:
        await self._call("finish_update", version)

    async def _give_memory_back(self, parts: Sequence[MemoryPart], keep_weights: bool) -> None:
        if keep_weights and not LIMITS.keeps_weights(self._config, self._dimensions):
            problem = "SGLang was started without a copy of its weights, so it cannot keep them while asleep"
            remedy = f"set rollout.engine_args.{WEIGHTS_BACKUP}=true"
            raise EngineError(problem, code="engine-keeps-no-weights", who=self._name, remedy=remedy)
        await self._call("release_memory", tuple(reversed(parts)), during="sleep")

    async def _take_memory(self, parts: Sequence[MemoryPart]) -> None:
        await self._call("resume_memory", tuple(parts), during="wake")

    async def _call(self, method: str, *arguments: Any, during: str = "") -> Any:
        """Call a method of the process. Errors name ``during``. In weight updates, the caller names the phase."""
        process = self._alive()
        try:
            return await process.call(method, *arguments)
        except ProcessEnded as error:
            raise self._faults.died(during and f"during {during}") from error
        except EngineError as error:
            if not during:
                raise
            raise EngineError(f"{during} failed: {error}", code="engine-call-failed", who=self._name) from error
