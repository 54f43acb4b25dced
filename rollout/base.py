"""Bookkeeping that all engines share: requests, pauses, sleep, state of the weights."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Collection, Sequence
from contextlib import asynccontextmanager
from functools import cached_property
from typing import Any, Generic, Literal, TypeVar

from rollout.limits import on_cpu, sleep_mode
from rollout.requests import StopTexts, check_request
from rollout.weight_update import AdapterTarget, UpdateTarget, WeightUpdateState, common_checksums, function_of
from slime_like.config import RunConfig
from slime_like.errors import EngineError, WeightSyncError
from slime_like.hosting.faults import EngineFaults, code_of, one_line
from slime_like.interfaces import BucketMetadata, EngineHealth, GenerationRequest, Manifest, PauseMode, UpdateReceipt
from slime_like.interfaces.engine import WHOLE, EngineNode
from slime_like.interfaces.engine_limits import EngineLimits
from slime_like.interfaces.weights import MODEL
from slime_like.models.dimensions import ModelDimensions
from slime_like.models.tokenization import load_tokenizer
from slime_like.plugins.options import load_option
from slime_like.weights.adapter import ADAPTER
from slime_like.weights.expected_tensors import expected_tensors
from slime_like.weights.received import WeightReceiver

MemoryPart = Literal["weights", "kv_cache"]
_MEMORY_PARTS: tuple[MemoryPart, ...] = ("weights", "kv_cache")
_HEALTH_TIMEOUT_S = 10.0

Running = TypeVar("Running")
T = TypeVar("T")


class EngineHooks(UpdateTarget, Generic[Running]):
    """Methods that an engine implements. ``EngineBase`` calls them after its checks. ``Running`` is a started engine.

    ``rollout.request_timeout_s`` or ``sync.timeout_s`` bounds the methods after ``_own_process_ids``.

    Attributes:
        receiver: receiver of weights in this process. An engine whose ranks have receivers replaces ``_receive``.
    """

    receiver: WeightReceiver

    async def _start(self) -> None:
        """Start the engine. The caller bounds the time, and calls ``stop`` if this raises or is canceled."""
        raise NotImplementedError

    async def stop(self) -> None:
        """Stop the engine and every process it started, by process id, within seconds. May be called twice."""
        raise NotImplementedError

    def _alive(self) -> Running:
        """Return the running engine. Raises ``EngineError`` if it was not started, or has died."""
        raise NotImplementedError

    async def _ping(self) -> None:
        """Return after the process that does the work has answered; raise if it is dead."""
        raise NotImplementedError

    def _own_process_ids(self) -> tuple[int, ...]:
        return ()

    async def _freeze(self, mode: PauseMode) -> None:
        raise NotImplementedError

    async def _thaw(self) -> None:
        raise NotImplementedError

    async def _receive(self, method: str, *arguments: Any) -> list[Any]:
        """Call a method of every rank's receiver, or a function (``function_of``), and return the results.

        By default in a thread, because connecting waits for the trainers.
        """
        return [await asyncio.to_thread(function_of(self, method), *arguments)]

    async def _begin_update(self) -> None:
        await self._receive("begin_update")

    async def _give_memory_back(self, parts: Sequence[MemoryPart], keep_weights: bool) -> None:
        """Release the device's memory. On a CPU, this and ``_take_memory`` are not called."""
        raise NotImplementedError

    async def _take_memory(self, parts: Sequence[MemoryPart]) -> None:
        raise NotImplementedError


class EngineBase(EngineHooks[Running]):
    """The part of ``RolloutEngine`` that all engines share. An engine adds ``generate`` and the hooks.

    Attributes:
        limits: checked at the start, because an engine may be started without a run.
        sleep_argument: engine argument without which it cannot release its memory; "": it always can.
        serve_adapter: the function with which it serves low-rank factors (``AdapterTarget``); "": it cannot.
        returns_supports: generations for training include the support of each token.
        returns_routes: with ``algorithm.routing_replay=rollout``, they have the field "routes" (``SampledFields``).
        prompt_fields: fields of prompts that the engine uses. It rejects others.
        targets: what an update can replace, by ``Manifest.updates``: the model, which the engine itself loads, or
            only an adapter.
    """

    limits = EngineLimits(name="")
    sleep_argument = serve_adapter = ""
    returns_supports = False
    returns_routes = False
    prompt_fields: Collection[str] = ()

    def __init__(self, config: RunConfig, engine_index: int, kind: str, part: EngineNode = WHOLE) -> None:
        self._config = config
        self._records_routes = config.algorithm.routing_replay == "rollout"
        self._index, self._part = engine_index, part
        self._name = f"{kind} engine {engine_index}" + (f" on {part.address}" if part.spans else "")
        self._faults = EngineFaults(self._name, config.run_dir)
        self._dimensions = ModelDimensions.from_checkpoint(config.model.path)
        self._quantized = config.sync.quantization != "none"
        expected = expected_tensors(config.model.path)
        self.expected = load_option("quantized-shapes")(expected) if self._quantized else expected
        self.receiver = WeightReceiver()
        self._target: UpdateTarget = self
        self.targets: dict[str, UpdateTarget] = {MODEL: self}
        if self.serve_adapter and config.model.lora.sends_factors:
            adapter = AdapterTarget(config.model, self._receive, self.serve_adapter, self._finish_update)
            self.targets = {ADAPTER: adapter}
        self._promised: dict[str, int] = {}
        self._reset()

    async def start(self) -> None:
        """Load the model as weight version 0, awake and not paused.

        Raises ``EngineError`` if an engine argument is not supported, the start failed, or it took longer than
        ``rollout.start_timeout_s``.
        """
        for problem in self.limits.argument_problems(self._config.rollout, is_here=True):
            raise EngineError(problem, code="engine-arguments")
        self._reset()
        timeout = self._config.engine_start_timeout_s
        try:
            async with asyncio.timeout(timeout):
                await self._start()
                if self._quantized:
                    self._state.forget("has no 8-bit weights before its first update")
                for target in self.targets.values() if self._part.number == 0 else ():
                    await target._serve_initial()
        except TimeoutError as error:
            await self.stop()
            raise self._faults.start_timeout(timeout) from error
        except BaseException:
            await self.stop()
            raise

    def _reset(self) -> None:
        self._state = WeightUpdateState(self._name, {name: each.expected for name, each in self.targets.items()})
        self._paused = self._resume_after_update = False
        self._asleep: set[str] = set()

    # ------------------------------------------------------------------------------------------------------- requests
    @cached_property
    def _stop_texts(self) -> StopTexts:
        return StopTexts(load_tokenizer(self._config.model.path, self._config.model.trust_remote_code))

    def _serving(self) -> Running:
        """Return the running engine. Raises ``EngineError`` if it may not sample now."""
        running = self._alive()
        self._state.require_serving()
        self._require_awake(self._asleep)
        return running

    def _require_awake(self, parts: Collection[str]) -> None:
        if asleep := sorted(self._asleep.intersection(parts)):
            problem = f"{self._name} is asleep ({', '.join(asleep)})"
            raise EngineError(problem, code="engine-asleep", remedy="call wake first")

    @asynccontextmanager
    async def _promising(self, request: GenerationRequest) -> AsyncIterator[Running]:
        """Check and register the request. The caller bounds the block."""
        check_request(request, self._dimensions, self._config.max_model_len, self.returns_supports, self.prompt_fields)
        running = self._serving()
        self._promised[request.request_id] = request.num_samples * request.sampling.max_new_tokens
        try:
            yield running
        finally:
            del self._promised[request.request_id]

    async def pause(self, mode: PauseMode = "keep") -> None:
        """Stop sampling. Requests that arrive while paused wait for ``resume``."""
        await self._bounded(f"pause({mode})", self._freeze(mode))
        self._paused, self._resume_after_update = True, False

    async def resume(self) -> None:
        self._serving()
        await self._bounded("resume", self._thaw())
        self._paused = False

    # -------------------------------------------------------------------------------------------------------- weights
    async def connect(self, transport: str, rendezvous: dict[str, Any]) -> None:
        """Join the weight transport on every rank, even if this engine was connected before."""
        self._alive()
        await self._sync_call("connect", self._receive("connect", transport, rendezvous))

    async def begin_update(self, version: int, manifest: Manifest) -> None:
        """Open an update. Running requests are frozen until it is finished, unless the caller has already paused."""
        self._alive()
        self._require_awake(("weights",))
        if not self._paused:
            await self.pause("keep")
            self._resume_after_update = True
        self._state.begin(version, manifest)
        self._target = self.targets[manifest.updates]
        await self._sync_call("begin_update", self._target._begin_update())

    async def update(self, bucket: BucketMetadata) -> None:
        self._alive()
        self._require_awake(("weights",))
        self._state.check_bucket(bucket.entries)
        await self._sync_call("update", self._target._update(bucket))

    async def finish_update(self, version: int) -> UpdateReceipt:
        self._alive()
        self._require_awake(("weights",))
        received, hash_s = await self._sync_call("finish_update", self._received())
        self._state.check_complete(version, received)
        await self._sync_call("finish_update", self._target._finish_update(version))
        receipt = self._state.commit(received, hash_s)
        if self._resume_after_update:
            self._resume_after_update = False
            await self.resume()
        return receipt

    async def _received(self) -> tuple[dict[str, int], float]:
        """Return the hashes of all tensors received in the open update, and the seconds spent hashing."""
        return common_checksums(await self._receive("received"))

    # ------------------------------------------------------------------------------------------------ health and turns
    async def health(self) -> EngineHealth:
        try:
            await asyncio.wait_for(self._ping(), _HEALTH_TIMEOUT_S)
            alive = True
        except Exception:  # any error means that the engine is dead or hangs
            alive = False
        return EngineHealth(
            alive=alive,
            weight_version=self._state.version,
            running_requests=len(self._promised),
            outstanding_tokens=sum(self._promised.values()),
            process_ids=self._own_process_ids(),
        )

    async def profile(self, path: str | None, memory: bool) -> None:
        """Start to trace every rank, or, with a ``path``, write each rank's trace to a file that begins with it."""
        self._alive()
        await self._bounded("profile", self._receive("weight_update:profile", path, memory))

    async def sleep(self, keep_weights: bool = True) -> None:
        """End running requests and release the device's memory. On a CPU, only the state changes."""
        self._alive()
        keep_weights = keep_weights or MODEL not in self.targets
        awake = [part for part in _MEMORY_PARTS if part not in self._asleep]
        if awake:  # after a failed sync, only the weights
            await self.pause("abort")
            if not on_cpu():
                self._require_sleep_mode()
                await self._bounded("sleep", self._give_memory_back(awake, keep_weights))
        if "weights" in awake and not keep_weights:
            self._state.forget("dropped its weights when it went to sleep")
        self._asleep.update(awake)

    async def wake(self, parts: Sequence[MemoryPart]) -> None:
        self._alive()
        asleep = [part for part in parts if part in self._asleep]
        if not asleep:
            return
        if not on_cpu():
            await self._bounded("wake", self._take_memory(asleep))
        self._asleep.difference_update(asleep)
        if not self._asleep:
            await self.resume()

    def _require_sleep_mode(self) -> None:
        argument = self.sleep_argument
        if argument and not sleep_mode(self._config.rollout, self._config.cluster, argument):
            remedy = f"set cluster.placement=colocated, or rollout.engine_args.{argument}=true"
            raise EngineError(f"{self._name} cannot release its memory", code="engine-keeps-memory", remedy=remedy)

    # --------------------------------------------------------------------------------------------------- bounded calls
    async def _bounded(self, phase: str, call: Awaitable[T]) -> T:
        timeout = self._config.request_timeout_s
        try:
            return await asyncio.wait_for(call, timeout)
        except TimeoutError as error:
            problem = f"{phase} did not end within {timeout:g} s"
            raise EngineError(problem, code="engine-timeout", who=self._name) from error

    async def _sync_call(self, phase: str, call: Awaitable[T]) -> T:
        """Run one step of a weight update. If it fails, the update has failed. The error keeps its cause's code."""
        timeout = self._config.sync.timeout_s
        try:
            return await asyncio.wait_for(call, timeout)
        except Exception as error:
            reason = f"no answer within {timeout:g} s" if isinstance(error, TimeoutError) else one_line(error)
            reason = reason.removeprefix(f"{self._name}: ")  # the new error names it
            self._state.fail(reason)
            code = code_of(error, "sync-call-failed")
            raise WeightSyncError(f"{phase} failed: {reason}", code=code, who=self._name) from error
