"""A plain Hugging Face model behind ``RolloutEngine``: slow, simple, and needing nothing but transformers.

It runs inside the process that owns it; decoding happens in a thread, so that the event loop stays free.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from rollout.requests import check_request, sample_seed, stop_ids
from rollout.weight_update import WeightUpdateState
from slime_like.config.dimensions import ModelDimensions
from slime_like.errors import EngineError, WeightSyncError
from slime_like.interfaces import (
    BucketMetadata,
    EngineHealth,
    Generation,
    GenerationRequest,
    PauseMode,
    UpdateReceipt,
)
from slime_like.weights.arrival import Arrivals
from slime_like.weights.expected import expected_tensors
from slime_like.weights.transports.base import Receiver
from slime_like.weights.transports.registry import open_receiver

if TYPE_CHECKING:
    from rollout.transformers.scheduler import DecodeScheduler
    from slime_like.config import RunConfig

_STOP_TIMEOUT_S = 10.0
_ARGUMENTS = ("attn_implementation", "max_batch_size")
_MAX_BATCH_SIZE = 512
_LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})  # what a cache of keys and values by column serves


class TransformersEngine:
    """One model in this process. ``rollout.engine_args``: ``attn_implementation``, ``max_batch_size`` (sequences)."""

    def __init__(self, config: RunConfig, engine_index: int) -> None:
        self._config = config
        self._name = f"transformers engine {engine_index}"
        self._dimensions = ModelDimensions.from_checkpoint(config.model.path)
        self._expected = expected_tensors(config.model.path)
        self._state = WeightUpdateState(self._name, self._expected)
        self._unseeded = random.Random(config.seed * 1_000_003 + engine_index)
        self._receivers: dict[str, Receiver] = {}
        self._arrivals = Arrivals()
        self._model: Any = None
        self._destinations: dict[str, Tensor] = {}
        self._scheduler: DecodeScheduler | None = None
        self._promised: dict[str, int] = {}
        self._paused = False
        self._asleep: set[str] = set()
        self._resume_after_update = False

    async def start(self) -> None:
        """Load the model.

        Raises:
            EngineError: an engine argument or ``rollout.tensor`` is refused, or loading fails or takes too long.
        """
        self._check_arguments()
        self._state = WeightUpdateState(self._name, self._expected)
        self._paused, self._resume_after_update, self._asleep = False, False, set()
        timeout = self._config.rollout.start_timeout_s
        try:
            self._scheduler = await asyncio.wait_for(asyncio.to_thread(self._load), timeout)
        except TimeoutError as error:
            raise EngineError(f"{self._name} did not start within rollout.start_timeout_s={timeout:g} s") from error
        except (OSError, ValueError, RuntimeError, ImportError) as error:
            raise EngineError(f"{self._name} did not start: {type(error).__name__}: {error}") from error

    async def generate(self, request: GenerationRequest) -> list[Generation]:
        from rollout.transformers.scheduler import PendingRequest

        check_request(request, self._dimensions, self._config.max_model_len)
        scheduler = self._serving()
        if request.request_id in self._promised:
            raise EngineError(f"request {request.request_id} is already running on {self._name}; ids must be unique")
        samples = [self._sample(request, index) for index in range(request.num_samples)]
        pending = PendingRequest(request.request_id, samples, request.prompt_logprobs)
        timeout = self._config.rollout.request_timeout_s
        self._promised[request.request_id] = request.num_samples * request.sampling.max_new_tokens
        try:
            scheduler.submit(pending)
            return await asyncio.wait_for(asyncio.wrap_future(pending.result), timeout)
        except TimeoutError as error:
            raise EngineError(
                f"request {request.request_id} took longer than rollout.request_timeout_s={timeout:g} s on {self._name}"
            ) from error
        finally:
            del self._promised[request.request_id]
            if pending.result.cancelled():  # the caller was cancelled, or gave up
                scheduler.abort(request.request_id)

    async def abort(self, request_id: str | None = None) -> None:
        self._alive().abort(request_id)

    async def pause(self, mode: PauseMode = "keep") -> None:
        """Stop sampling between two tokens; requests that come while paused wait for ``resume``."""
        timeout = self._config.rollout.request_timeout_s
        reached = self._alive().pause(mode)
        try:
            await asyncio.wait_for(asyncio.wrap_future(reached), timeout)
        except TimeoutError as error:
            raise EngineError(f"{self._name}: no end of pause({mode}) within {timeout:g} s") from error
        self._paused = True
        self._resume_after_update = False

    async def resume(self) -> None:
        self._serving().resume()
        self._paused = False

    async def connect(self, transport: str, rendezvous: dict[str, Any]) -> None:
        self._alive()
        previous = self._receivers.pop(transport, None)
        if previous is not None:
            previous.close()
        self._receivers[transport] = open_receiver(transport, rendezvous)

    async def begin_update(self, version: int) -> None:
        """Open an update. Requests that run are frozen until it is finished, unless the caller has paused before."""
        self._alive()
        if not self._paused:
            await self.pause("keep")
            self._resume_after_update = True
        self._arrivals = Arrivals()
        self._state.begin(version)

    async def update(self, bucket: BucketMetadata) -> None:
        self._alive()
        try:
            self._state.check_bucket(bucket.entries)
            await asyncio.wait_for(asyncio.to_thread(self._load_bucket, bucket), self._config.sync.timeout_s)
        except WeightSyncError as error:
            self._state.fail(str(error))
            raise
        except TimeoutError as error:
            self._state.fail("time ran out")
            raise WeightSyncError(
                f"{self._name}: a bucket took longer than sync.timeout_s={self._config.sync.timeout_s:g} s"
            ) from error

    async def finish_update(self, version: int) -> UpdateReceipt:
        scheduler = self._alive()
        try:
            self._state.check_complete(version, self._arrivals.checksums)
        except WeightSyncError as error:
            self._state.fail(str(error))
            raise
        scheduler.set_version(version)
        receipt = self._state.commit(self._arrivals.checksums, self._arrivals.hashing.seconds)
        if self._resume_after_update:
            self._resume_after_update = False
            await self.resume()
        return receipt

    async def checksums(self) -> dict[str, int]:
        return dict(self._state.checksums)

    async def health(self) -> EngineHealth:
        """The engine has no process of its own, so ``process_ids`` is empty."""
        return EngineHealth(
            alive=self._scheduler is not None and self._scheduler.is_alive,
            weight_version=self._state.version,
            running_requests=len(self._promised),
            outstanding_tokens=sum(self._promised.values()),
        )

    async def sleep(self) -> None:
        """End what runs, and move the weights to host memory; caches go with their requests."""
        await self.abort()
        await self.pause("wait")
        self._asleep = {"weights", "kv_cache"}
        await asyncio.to_thread(self._move, "cpu")

    async def wake(self, parts: Sequence[Literal["weights", "kv_cache"]]) -> None:
        self._alive()
        if "weights" in parts:
            await asyncio.to_thread(self._move, _device())
        self._asleep -= set(parts)
        if not self._asleep:
            await self.resume()

    async def stop(self) -> None:
        """End the decode thread and free the model. May be called twice."""
        scheduler, self._scheduler = self._scheduler, None
        if scheduler is not None:
            ended = await asyncio.to_thread(scheduler.stop, _STOP_TIMEOUT_S)
            if not ended:
                raise EngineError(f"{self._name}: the decode thread did not end within {_STOP_TIMEOUT_S:g} s")
        for receiver in self._receivers.values():
            receiver.close()
        self._receivers.clear()
        self._model, self._destinations = None, {}

    def _check_arguments(self) -> None:
        for name in self._config.rollout.engine_args:
            if name not in _ARGUMENTS:
                raise EngineError(
                    f"rollout.engine_args.{name}: the transformers engine has no such argument; it knows "
                    f"{', '.join(_ARGUMENTS)}"
                )
        if self._config.rollout.tensor != 1:
            raise EngineError(
                f"rollout.tensor={self._config.rollout.tensor}: the transformers engine runs on one device; use 1, or "
                "rollout.engine=vllm"
            )

    def _load(self) -> DecodeScheduler:
        from transformers import AutoModelForCausalLM

        from rollout.transformers.attention import GROUPED_SDPA, register
        from rollout.transformers.scheduler import DecodeScheduler

        register()
        arguments = self._config.rollout.engine_args
        model = AutoModelForCausalLM.from_pretrained(
            self._config.model.path,
            dtype=getattr(torch, self._config.model.dtype),
            attn_implementation=arguments.get("attn_implementation", GROUPED_SDPA),
            trust_remote_code=self._config.model.trust_remote_code,
        )
        others = set(getattr(model.config, "layer_types", None) or ()) - _LAYER_TYPES
        if others:
            raise EngineError(
                f"{self._config.model.path}: layers of type {', '.join(sorted(others))}; the transformers engine knows "
                f"{' and '.join(sorted(_LAYER_TYPES))} only: use rollout.engine=vllm"
            )
        self._model = model.eval().requires_grad_(False)
        self._move(_device())
        return DecodeScheduler(model, int(arguments.get("max_batch_size", _MAX_BATCH_SIZE)))

    def _move(self, device: str) -> None:
        from rollout.transformers.weights import destinations

        self._model.to(device)
        self._destinations = destinations(self._model)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def _load_bucket(self, bucket: BucketMetadata) -> None:
        """Hash every tensor as received, and only then copy all of them into the model."""
        from rollout.transformers.weights import destination

        receiver = self._receivers.get(bucket.transport)
        if receiver is None:
            raise WeightSyncError(f"{self._name}: transport {bucket.transport} is not connected; call connect first")
        arrivals, tensors = self._arrivals, list(receiver.receive(bucket))
        try:
            arrivals.check(bucket.entries, tensors)
        except WeightSyncError as error:
            raise WeightSyncError(f"{self._name}: {error}") from error
        for name, tensor in tensors:
            destination(name, self._destinations).copy_(tensor)
        if torch.cuda.is_available():
            torch.cuda.current_stream().synchronize()  # the sender may write to the bucket's memory again

    def _sample(self, request: GenerationRequest, index: int) -> Any:
        from rollout.transformers.samples import Sample

        seed = self._unseeded.getrandbits(62) if request.seed is None else sample_seed(request.seed, index)
        return Sample(
            prompt=list(request.prompt_tokens),
            sampling=request.sampling,
            stop_ids=frozenset(stop_ids(request.sampling, self._dimensions)),
            stream=random.Random(seed),
        )

    def _alive(self) -> DecodeScheduler:
        if self._scheduler is None:
            raise EngineError(f"{self._name} is not running; call start first")
        return self._scheduler

    def _serving(self) -> DecodeScheduler:
        scheduler = self._alive()
        self._state.require_serving()
        if self._asleep:
            raise EngineError(f"{self._name} sleeps ({', '.join(sorted(self._asleep))}); call wake first")
        return scheduler


def _device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"
