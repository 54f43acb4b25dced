"""The bookkeeping of every engine: requests, pauses, sleep, the state of its weights."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Sequence
from contextlib import asynccontextmanager
from typing import TypeVar

from rollout.hooks import MEMORY_PARTS, EngineHooks, MemoryPart, Running
from rollout.requests import check_request
from rollout.weight_update import WeightUpdateState
from slime_like.config import RunConfig
from slime_like.errors import EngineError, WeightSyncError
from slime_like.hosting.calls import code_of, one_line
from slime_like.hosting.faults import EngineFaults
from slime_like.interfaces import BucketMetadata, EngineHealth, GenerationRequest, PauseMode, UpdateReceipt
from slime_like.models.dimensions import ModelDimensions
from slime_like.weights.expected_tensors import expected_tensors

_HEALTH_TIMEOUT_S = 10.0

T = TypeVar("T")


async def answers(call: Awaitable[object]) -> bool:
    """True if the call has a result within a bound; dead and hung processes have none."""
    try:
        await asyncio.wait_for(call, _HEALTH_TIMEOUT_S)
    except Exception:  # of whatever kind: the answer to "alive?" is no
        return False
    return True


class EngineBase(EngineHooks[Running]):
    """The half of ``RolloutEngine`` that is the same for all.

    An engine adds ``generate``, ``abort``, ``connect``, and the hooks that raise ``NotImplementedError``.
    """

    def __init__(self, config: RunConfig, engine_index: int, kind: str) -> None:
        self._config = config
        self._index = engine_index
        self._name = f"{kind} engine {engine_index}"
        self._faults = EngineFaults(self._name, config.run_dir)
        self._dimensions = ModelDimensions.from_checkpoint(config.model.path)
        self._expected = expected_tensors(config.model.path)
        self._promised: dict[str, int] = {}
        self._reset()

    async def start(self) -> None:
        """Load the model as weight version 0, awake and not paused.

        Raises:
            EngineError: an engine argument is rejected, the start fails, or it takes longer than
                ``rollout.start_timeout_s``.
        """
        self._reset()
        timeout = self._config.rollout.start_timeout_s
        try:
            async with asyncio.timeout(timeout):
                await self._start()
        except TimeoutError as error:
            await self.stop()
            raise self._faults.start_timeout(timeout) from error
        except BaseException:
            await self.stop()
            raise

    def _reset(self) -> None:
        self._state = WeightUpdateState(self._name, self._expected)
        self._paused = self._resume_after_update = False
        self._asleep: set[str] = set()

    # ------------------------------------------------------------------------------------------------------- requests
    def _serving(self) -> Running:
        """Raises ``EngineError`` where nothing may be sampled now."""
        running = self._alive()
        self._state.require_serving()
        if self._asleep:
            parts = ", ".join(sorted(self._asleep))
            raise EngineError(f"{self._name} sleeps ({parts})", code="engine-asleep", remedy="call wake first")
        return running

    @asynccontextmanager
    async def _promising(self, request: GenerationRequest) -> AsyncIterator[Running]:
        """Check and count the request, and bound the block by ``rollout.request_timeout_s``."""
        check_request(request, self._dimensions, self._config.max_model_len)
        running = self._serving()
        name, timeout = request.request_id, self._config.rollout.request_timeout_s
        if name in self._promised:
            problem = f"request {name} is already running on {self._name}"
            raise EngineError(problem, code="duplicate-request", remedy="ids must be unique")
        self._promised[name] = request.num_samples * request.sampling.max_new_tokens
        try:
            async with asyncio.timeout(timeout):
                yield running
        except TimeoutError as error:
            problem = f"request {name} took longer than rollout.request_timeout_s={timeout:g} s on {self._name}"
            raise EngineError(problem, code="request-timeout") from error
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
            problem = f"no end of {phase} within {timeout:g} s"
            raise EngineError(problem, code="engine-timeout", who=self._name) from error

    async def _sync_call(self, phase: str, call: Awaitable[T]) -> T:
        """One step of a weight update; if it fails the update has failed. The error keeps its cause's code."""
        timeout = self._config.sync.timeout_s
        try:
            return await asyncio.wait_for(call, timeout)
        except Exception as error:
            reason = f"no answer within {timeout:g} s" if isinstance(error, TimeoutError) else one_line(error)
            reason = reason.removeprefix(f"{self._name}: ")  # which the new error names
            self._state.fail(reason)
            code = code_of(error, "sync-call-failed")
            raise WeightSyncError(f"{phase} failed: {reason}", code=code, who=self._name) from error
