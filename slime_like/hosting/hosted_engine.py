"""A rollout engine that lives in another interpreter (``rollout.python``), behind ``RolloutEngine`` as any other."""

import asyncio
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from slime_like import errors
from slime_like.config import RunConfig
from slime_like.errors import EngineError, SlimeLikeError
from slime_like.hosting.calls import Answer
from slime_like.hosting.child_process import ChildProcess, ProcessEnded
from slime_like.interfaces import (
    BucketMetadata,
    EngineHealth,
    Generation,
    GenerationRequest,
    PauseMode,
    UpdateReceipt,
)

_MODULE = "slime_like.hosting.main"
_END_S = 5.0
_HEALTH_TIMEOUT_S = 15.0
_SLACK_S = 15.0
"""The engine bounds every call itself and says more about it; this much later we give up on its process."""


class HostedEngine:
    """Passes every call on to a process of the other interpreter, where the engine's own class answers it.

    The process needs this distribution's light part, in this very version, and the engine. It ends with its owner.
    """

    def __init__(self, config: RunConfig, engine_index: int) -> None:
        self._config = config
        self._index = engine_index
        self._name = f"engine {engine_index} ({config.rollout.engine} in {config.rollout.python})"
        self._log = f"its log is in {config.run_dir}/worker_logs"
        self._process: _Hosted | None = None
        self._version = 0

    async def start(self) -> None:
        timeout = self._config.rollout.start_timeout_s
        process = self._process = _Hosted(str(self._config.rollout.python), _MODULE, _environment)
        try:
            async with asyncio.timeout(timeout):
                await process.start(self._config.model_dump(mode="json"), self._index)
                await process.call("start")
        except BaseException as error:
            await self._end()
            if isinstance(error, TimeoutError):
                reason = f"{self._name} did not start within rollout.start_timeout_s={timeout:g} s; {self._log}"
                raise EngineError(reason) from error
            if isinstance(error, ProcessEnded):
                raise EngineError(f"{self._name} did not start: its process ended; {self._log}") from error
            raise
        process.note_processes()
        self._version = 0

    async def generate(self, request: GenerationRequest) -> list[Generation]:
        answered = False
        try:
            samples: list[Generation] = await self._call(
                "generate", request, bound_s=self._config.rollout.request_timeout_s
            )
            answered = True
            return samples
        except SlimeLikeError:
            answered = True
            raise
        finally:
            if not answered and self._process is not None and self._process.alive:  # the caller has given up
                self._process.tell("abort", request.request_id)

    async def abort(self, request_id: str | None = None) -> None:
        await self._call("abort", request_id)

    async def pause(self, mode: PauseMode = "keep") -> None:
        await self._call("pause", mode, bound_s=self._config.rollout.request_timeout_s)

    async def resume(self) -> None:
        await self._call("resume", bound_s=self._config.rollout.request_timeout_s)

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
        """Return the engine's health; dead if its process does not answer."""
        process = self._process
        if process is None:
            return EngineHealth(False, self._version, 0, 0)
        try:
            found: EngineHealth = await asyncio.wait_for(process.call("health"), _HEALTH_TIMEOUT_S)
        except Exception:  # whatever a dead or hung process answers, the answer to "alive?" is no
            return EngineHealth(False, self._version, 0, 0, process.process_ids)
        ids = tuple(dict.fromkeys((*process.process_ids, *found.process_ids)))
        return EngineHealth(found.alive, found.weight_version, found.running_requests, found.outstanding_tokens, ids)

    async def sleep(self) -> None:
        await self._call("sleep", bound_s=self._config.rollout.request_timeout_s)

    async def wake(self, parts: Sequence[Literal["weights", "kv_cache"]]) -> None:
        await self._call("wake", tuple(parts), bound_s=self._config.rollout.request_timeout_s)

    async def stop(self) -> None:
        """The engine in good order, then its process, by id. May be called twice."""
        if self._process is None:
            return
        try:
            if self._process.alive:
                await self._call("stop")
        finally:
            await self._end()

    async def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            await asyncio.to_thread(process.end, _END_S)

    async def _call(self, method: str, *arguments: Any, bound_s: float | None = None) -> Any:
        process = self._process
        if process is None:
            raise EngineError(f"{self._name} is not running; call start first")
        bound = (bound_s or self._config.sync.timeout_s) + _SLACK_S
        try:
            return await asyncio.wait_for(process.call(method, *arguments), bound)
        except TimeoutError as error:
            raise EngineError(f"{self._name} gave no answer to {method} within {bound:g} s") from error
        except ProcessEnded as error:
            raise EngineError(f"{self._name} died, at the latest during {method}; {self._log}") from error


class _Hosted(ChildProcess):
    """Errors of this distribution keep their class: who calls an engine tells them apart."""

    def error(self, answer: Answer) -> Exception:
        kind = getattr(errors, answer.kind, None)
        if isinstance(kind, type) and issubclass(kind, SlimeLikeError) and kind is not errors.ConfigError:
            return kind(str(answer.error))
        return EngineError(str(answer.error))


def _environment(scratch: Path) -> dict[str, str]:
    """Copy this environment without variables that redirect another interpreter."""
    return {name: value for name, value in os.environ.items() if name not in ("PYTHONHOME", "VIRTUAL_ENV")}
