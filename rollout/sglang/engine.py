"""SGLang behind ``RolloutEngine``: its engine, in processes of its own."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

from rollout.requests import check_request
from rollout.sglang.arguments import check_names, environment, on_cpu, sleep_mode
from rollout.weight_update import WeightUpdateState
from slime_like.config.dimensions import ModelDimensions
from slime_like.errors import EngineError, WeightSyncError
from slime_like.hosting.child import ChildProcess, ProcessEnded
from slime_like.interfaces import (
    BucketMetadata,
    EngineHealth,
    Generation,
    GenerationRequest,
    PauseMode,
    UpdateReceipt,
)
from slime_like.weights.expected import expected_tensors
from slime_like.weights.wire import metadata_to_wire

if TYPE_CHECKING:
    from slime_like.config import RunConfig

_MODULE = "rollout.sglang.main"
_END_S = 3.0
"""For SGLang's processes to be gone after they were killed; they have nothing to save."""
_HEALTH_TIMEOUT_S = 10.0


class SglangEngine:
    """One SGLang engine of ``config.rollout.tensor`` ranks.

    On a CPU there is no memory to give back: ``sleep`` and ``wake`` change the state only.
    """

    def __init__(self, config: RunConfig, engine_index: int) -> None:
        self._config = config
        self._index = engine_index
        self._name = f"SGLang engine {engine_index}"
        self._dimensions = ModelDimensions.from_checkpoint(config.model.path)
        self._expected = expected_tensors(config.model.path)
        self._state = WeightUpdateState(self._name, self._expected)
        self._process: ChildProcess | None = None
        self._promised: dict[str, int] = {}
        self._paused = False
        self._asleep: set[str] = set()
        self._resume_after_update = False

    async def start(self) -> None:
        """Start SGLang's processes and load the model.

        Raises:
            EngineError: an engine argument is refused, the start fails, or it takes longer than
                ``rollout.start_timeout_s``.
        """
        check_names(self._config.rollout.engine_args)
        self._check_length()
        self._state = WeightUpdateState(self._name, self._expected)
        self._paused, self._resume_after_update, self._asleep = False, False, set()
        timeout = self._config.rollout.start_timeout_s
        process = ChildProcess(sys.executable, _MODULE, lambda scratch: environment(self._config, scratch))
        try:
            await asyncio.wait_for(process.start(self._config, self._index), timeout)
        except BaseException as error:
            await asyncio.to_thread(process.end, _END_S)
            raise self._start_error(error, timeout) from error
        self._process = process

    async def generate(self, request: GenerationRequest) -> list[Generation]:
        check_request(request, self._dimensions, self._config.max_model_len)
        process = self._serving()
        if request.request_id in self._promised:
            raise EngineError(f"request {request.request_id} is already running on {self._name}; ids must be unique")
        self._promised[request.request_id] = request.num_samples * request.sampling.max_new_tokens
        timeout = self._config.rollout.request_timeout_s
        answered = False
        try:
            samples: list[Generation] = await asyncio.wait_for(process.call("generate", request), timeout)
            answered = True
            return samples
        except TimeoutError as error:
            raise EngineError(
                f"request {request.request_id} took longer than rollout.request_timeout_s={timeout:g} s on {self._name}"
            ) from error
        except ProcessEnded as error:
            raise EngineError(f"{self._name} died while it ran request {request.request_id}; see its log") from error
        except EngineError as error:
            answered = True
            raise EngineError(f"request {request.request_id} failed on {self._name}: {error}") from error
        finally:
            del self._promised[request.request_id]
            if not answered and process.alive:  # the caller was cancelled, or gave up
                process.tell("abort", request.request_id)

    async def abort(self, request_id: str | None = None) -> None:
        await self._bounded("abort", "abort", request_id)

    async def pause(self, mode: PauseMode = "keep") -> None:
        """Stop sampling; requests that come while paused wait for ``resume``."""
        await self._bounded(f"pause({mode})", "pause", mode)
        self._paused = True
        self._resume_after_update = False

    async def resume(self) -> None:
        self._serving()
        await self._bounded("resume", "resume")
        self._paused = False

    async def connect(self, transport: str, rendezvous: dict[str, Any]) -> None:
        """Join the weight transport on every rank, anew if this engine was connected."""
        await self._sync_call("connect", "connect", transport, rendezvous)

    async def begin_update(self, version: int) -> None:
        """Open an update. Requests that run are frozen until it is finished, unless the caller has paused before."""
        self._alive()
        if not self._paused:
            await self.pause("keep")
            self._resume_after_update = True
        self._state.begin(version)
        await self._sync_call("begin_update", "begin_update")

    async def update(self, bucket: BucketMetadata) -> None:
        self._alive()
        try:
            self._state.check_bucket(bucket.entries)
        except WeightSyncError as error:
            await self._close_failed(str(error))
            raise
        await self._sync_call("update", "update", metadata_to_wire(bucket))

    async def finish_update(self, version: int) -> UpdateReceipt:
        received, hash_s = await self._sync_call("finish_update", "received")
        try:
            self._state.check_complete(version, received)
        except WeightSyncError as error:
            await self._close_failed(str(error))
            raise
        await self._sync_call("finish_update", "finish_update", version)
        receipt = self._state.commit(received, hash_s)
        if self._resume_after_update:
            self._resume_after_update = False
            await self.resume()
        return receipt

    async def checksums(self) -> dict[str, int]:
        return dict(self._state.checksums)

    async def health(self) -> EngineHealth:
        """Asks the schedulers, not only SGLang's own process."""
        process = self._process
        alive = process is not None and process.alive
        if alive:
            assert process is not None
            try:
                await asyncio.wait_for(process.call("ping"), _HEALTH_TIMEOUT_S)
            except Exception:  # whatever a dead or hung process answers, the answer to "alive?" is no
                alive = False
        return EngineHealth(
            alive=alive,
            weight_version=self._state.version,
            running_requests=len(self._promised),
            outstanding_tokens=sum(self._promised.values()),
            process_ids=process.process_ids if process is not None else (),
        )

    async def sleep(self) -> None:
        """Give weights and KV cache back. On a CPU only the state changes: SGLang's memory saver needs CUDA."""
        await self.pause("abort")
        parts = ("kv_cache", "weights")
        if self._gives_memory_back():
            await self._bounded("sleep", "release_memory", parts)
        self._asleep = set(parts)

    async def wake(self, parts: Sequence[Literal["weights", "kv_cache"]]) -> None:
        self._alive()
        if self._gives_memory_back():
            await self._bounded("wake", "resume_memory", tuple(parts))
        self._asleep -= set(parts)
        if not self._asleep:
            await self.resume()

    async def stop(self) -> None:
        """End SGLang's processes, by process id, within seconds. May be called twice."""
        process, self._process = self._process, None
        if process is not None:
            await asyncio.to_thread(process.end, _END_S)

    def _check_length(self) -> None:
        longest, limit = self._config.max_model_len, self._dimensions.max_position_embeddings
        if longest > limit:
            raise EngineError(
                f"{self._name} did not start: rollout.max_model_len={longest} is more than the model's "
                f"max_position_embeddings={limit}; use at most that"
            )

    def _start_error(self, error: BaseException, timeout: float) -> BaseException:
        if isinstance(error, TimeoutError):
            return EngineError(f"{self._name} did not start within rollout.start_timeout_s={timeout:g} s")
        log = f"its log is in {self._config.run_dir}/worker_logs"
        if isinstance(error, ProcessEnded):
            return EngineError(f"{self._name} did not start: its process ended; {log}")
        if isinstance(error, EngineError):
            return EngineError(f"{self._name} did not start: {error}; {log}")
        return error

    def _alive(self) -> ChildProcess:
        if self._process is None:
            raise EngineError(f"{self._name} is not running; call start first")
        if not self._process.alive:
            raise EngineError(f"{self._name}: its process has died; see its log")
        return self._process

    def _serving(self) -> ChildProcess:
        process = self._alive()
        self._state.require_serving()
        if self._asleep:
            raise EngineError(f"{self._name} sleeps ({', '.join(sorted(self._asleep))}); call wake first")
        return process

    def _gives_memory_back(self) -> bool:
        """False on a CPU. On CUDA, True or an error that says what to set."""
        if on_cpu():
            return False
        if not sleep_mode(self._config):
            raise EngineError(
                f"{self._name} cannot give memory back; set cluster.placement=colocated, or "
                "rollout.engine_args.enable_memory_saver=true"
            )
        return True

    async def _bounded(self, phase: str, method: str, *arguments: Any) -> Any:
        timeout = self._config.rollout.request_timeout_s
        try:
            return await asyncio.wait_for(self._alive().call(method, *arguments), timeout)
        except TimeoutError as error:
            raise EngineError(f"{self._name}: no end of {phase} within {timeout:g} s") from error
        except ProcessEnded as error:
            raise EngineError(f"{self._name} died during {phase}; see its log") from error
        except EngineError as error:
            raise EngineError(f"{self._name}: {phase} failed: {error}") from error

    async def _sync_call(self, phase: str, method: str, *arguments: Any) -> Any:
        """One step of a weight update; if it fails the update has failed."""
        process, timeout = self._alive(), self._config.sync.timeout_s
        try:
            return await asyncio.wait_for(process.call(method, *arguments), timeout)
        except (TimeoutError, ProcessEnded, EngineError) as error:
            reason = str(error)
            if isinstance(error, TimeoutError):
                reason = f"no answer within {timeout:g} s"
            elif isinstance(error, ProcessEnded):
                reason = "its process has died; see its log"
            self._state.fail(reason)
            raise WeightSyncError(f"{self._name}: {phase} failed: {reason}") from error

    async def _close_failed(self, reason: str) -> None:
        """Close SGLang's side of an update that this side gives up."""
        if self._state.is_open:
            self._state.fail(reason)
            await self._sync_call("closing a failed update", "close_update")
