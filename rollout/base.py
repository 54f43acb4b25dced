"""The bookkeeping of every engine: requests, pauses, sleep, the state of its weights."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, TypeVar

from pydantic import ValidationError

from rollout.hooks import MEMORY_PARTS, EngineHooks, MemoryPart, Running
from rollout.requests import check_request
from rollout.weight_update import WeightUpdateState
from slime_like.errors import EngineError, SlimeLikeError, WeightSyncError
from slime_like.interfaces import BucketMetadata, EngineHealth, GenerationRequest, PauseMode, UpdateReceipt
from slime_like.models.dimensions import ModelDimensions
from slime_like.weights.expected_tensors import expected_tensors

if TYPE_CHECKING:
    from slime_like.config import RunConfig

T = TypeVar("T")


class EngineBase(EngineHooks[Running]):
    """The half of ``RolloutEngine`` that is the same for all.

    An engine adds ``start``, ``generate``, ``abort``, ``connect``, ``stop``, and the hooks that raise
    ``NotImplementedError``.
    """

    def __init__(self, config: RunConfig, engine_index: int, kind: str) -> None:
        self._config = config
        self._index = engine_index
        self._name = f"{kind} engine {engine_index}"
        self._log = f"its log is in {config.run_dir}/worker_logs"
        self._death = f"most often the kernel has killed it for want of memory (dmesg tells), and {self._log}"
        self._dimensions = ModelDimensions.from_checkpoint(config.model.path)
        self._expected = expected_tensors(config.model.path)
        self._promised: dict[str, int] = {}
        self._begin_anew()

    def _begin_anew(self) -> None:
        """Weight version 0, awake and not paused."""
        self._state = WeightUpdateState(self._name, self._expected)
        self._paused = self._resume_after_update = False
        self._asleep: set[str] = set()

    # ------------------------------------------------------------------------------------------------------- requests
    def _serving(self) -> Running:
        """Raises ``EngineError`` where nothing may be sampled now."""
        running = self._alive()
        self._state.require_serving()
        if self._asleep:
            raise EngineError(f"{self._name} sleeps ({', '.join(sorted(self._asleep))}); call wake first")
        return running

    @asynccontextmanager
    async def _promising(self, request: GenerationRequest) -> AsyncIterator[Running]:
        """Inside, the request is checked, counted, and bounded by ``rollout.request_timeout_s``."""
        check_request(request, self._dimensions, self._config.max_model_len)
        running = self._serving()
        name, timeout = request.request_id, self._config.rollout.request_timeout_s
        if name in self._promised:
            raise EngineError(f"request {name} is already running on {self._name}; ids must be unique")
        self._promised[name] = request.num_samples * request.sampling.max_new_tokens
        try:
            async with asyncio.timeout(timeout):
                yield running
        except TimeoutError as error:
            raise EngineError(
                f"request {name} took longer than rollout.request_timeout_s={timeout:g} s on {self._name}"
            ) from error
        finally:
            del self._promised[name]

    async def pause(self, mode: PauseMode = "keep") -> None:
        """Stop sampling; requests that come while paused wait for ``resume``."""
        await self._freeze(mode)
        self._paused, self._resume_after_update = True, False

    async def resume(self) -> None:
        self._serving()
        await self._thaw()
        self._paused = False

    # -------------------------------------------------------------------------------------------------------- weights
    async def begin_update(self, version: int) -> None:
        """Open an update. Requests that run are frozen until it is finished, unless the caller has paused before."""
        self._alive()
        await self._close_failed("the next update began before it was finished")
        if not self._paused:
            await self.pause("keep")
            self._resume_after_update = True
        self._state.begin(version)
        await self._begin_update()

    async def update(self, bucket: BucketMetadata) -> None:
        self._alive()
        try:
            self._state.check_bucket(bucket.entries)
        except WeightSyncError as error:
            await self._close_failed(str(error))
            raise
        await self._update(bucket)

    async def finish_update(self, version: int) -> UpdateReceipt:
        self._alive()
        try:
            received, hash_s = await self._received()
            self._state.check_complete(version, received)
        except WeightSyncError as error:
            await self._close_failed(str(error))
            raise
        await self._finish_update(version)
        receipt = self._state.commit(received, hash_s)
        if self._resume_after_update:
            self._resume_after_update = False
            await self.resume()
        return receipt

    async def checksums(self) -> dict[str, int]:
        return dict(self._state.checksums)

    async def _close_failed(self, reason: str) -> None:
        """Give up the open update, if there is one."""
        if self._state.is_open:
            self._state.fail(reason)
            await self._close_update()

    # ------------------------------------------------------------------------------------------------ health and turns
    async def health(self) -> EngineHealth:
        return EngineHealth(
            alive=await self._is_alive(),
            weight_version=self._state.version,
            running_requests=len(self._promised),
            outstanding_tokens=sum(self._promised.values()),
            process_ids=self._own_process_ids(),
        )

    async def sleep(self) -> None:
        """End what runs and give the device's memory back; on a CPU, where engines keep it, only the state changes."""
        self._alive()
        awake = [part for part in MEMORY_PARTS if part not in self._asleep]
        if awake:  # after a failed sync that is the weights alone
            await self.pause("abort")
            await self._give_memory_back(awake)
        self._asleep.update(awake)

    async def wake(self, parts: Sequence[MemoryPart]) -> None:
        self._alive()
        asleep = [part for part in parts if part in self._asleep]
        if not asleep:
            return
        await self._take_memory(asleep)
        self._asleep.difference_update(asleep)
        if not self._asleep:
            await self.resume()

    # --------------------------------------------------------------------------------------------------- bounded calls
    async def _bounded(self, phase: str, call: Awaitable[T]) -> T:
        timeout = self._config.rollout.request_timeout_s
        try:
            return await asyncio.wait_for(call, timeout)
        except TimeoutError as error:
            raise EngineError(f"{self._name}: no end of {phase} within {timeout:g} s") from error

    async def _sync_call(self, phase: str, call: Awaitable[T]) -> T:
        """One step of a weight update; if it fails the update has failed."""
        timeout = self._config.sync.timeout_s
        try:
            return await asyncio.wait_for(call, timeout)
        except Exception as error:
            reason = f"no answer within {timeout:g} s" if isinstance(error, TimeoutError) else one_line(error)
            reason = reason.removeprefix(f"{self._name}: ")
            self._state.fail(reason)
            raise WeightSyncError(f"{self._name}: {phase} failed: {reason}") from error


def one_line(error: Exception) -> str:
    """The error on one line, with its type unless it is this distribution's."""
    text = str(error) if isinstance(error, SlimeLikeError) else f"{type(error).__name__}: {_error_text(error)}"
    return " ".join(text.split())[:500]


def _error_text(error: Exception) -> str:
    """The text of an error; of pydantic's without the count and the addresses."""
    if not isinstance(error, ValidationError):
        return str(error)
    details = error.errors(include_url=False, include_context=False, include_input=False)
    places = (".".join(map(str, detail["loc"])) for detail in details)
    return "; ".join(
        f"{place}: {detail['msg']}" if place else detail["msg"] for place, detail in zip(places, details, strict=True)
    )
