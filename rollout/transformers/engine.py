"""A plain Hugging Face model behind ``RolloutEngine``: slow, simple, and needing nothing but transformers.

It runs inside the process that owns it; decoding happens in a thread, so that the event loop stays free.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rollout.base import EngineBase
from rollout.engine_arguments import check_arguments
from rollout.hooks import MemoryPart
from rollout.requests import sample_seed, stop_ids
from slime_like.cpu.choice import kernels_are_used
from slime_like.cpu.onednn import use_onednn
from slime_like.errors import EngineError, WeightSyncError
from slime_like.interfaces import BucketMetadata, Generation, GenerationRequest, PauseMode
from slime_like.system.memory import keep_freed_memory
from slime_like.weights.received import Arrivals
from slime_like.weights.transport import Receiver
from slime_like.weights.transports.registry import open_receiver

if TYPE_CHECKING:
    from rollout.transformers.scheduler import DecodeScheduler
    from slime_like.config import RunConfig

_STOP_TIMEOUT_S = 10.0
_MAX_BATCH_SIZE = 512
_LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})  # what a cache of keys and values by column serves


class TransformersEngine(EngineBase["DecodeScheduler"]):
    """One model in this process. ``rollout.engine_args``: ``attn_implementation``, ``max_batch_size`` (sequences)."""

    def __init__(self, config: RunConfig, engine_index: int) -> None:
        super().__init__(config, engine_index, "transformers")
        self._unseeded = random.Random(config.seed * 1_000_003 + engine_index)
        self._receivers: dict[str, Receiver] = {}
        self._arrivals = Arrivals()
        self._model: Any = None
        self._destinations: dict[str, Tensor] = {}
        self._scheduler: DecodeScheduler | None = None

    async def start(self) -> None:
        """Load the model.

        Raises:
            EngineError: an engine argument or ``rollout.tensor`` is rejected, or loading fails or takes too long.
        """
        check_arguments("transformers", self._config.rollout)
        self._begin_anew()
        timeout = self._config.rollout.start_timeout_s
        try:
            self._scheduler = await asyncio.wait_for(asyncio.to_thread(self._load), timeout)
        except TimeoutError as error:
            raise EngineError(f"{self._name} did not start within rollout.start_timeout_s={timeout:g} s") from error
        except (OSError, ValueError, RuntimeError, ImportError) as error:
            raise EngineError(f"{self._name} did not start: {type(error).__name__}: {error}") from error

    async def generate(self, request: GenerationRequest) -> list[Generation]:
        from rollout.transformers.scheduler import PendingRequest

        async with self._promising(request) as scheduler:
            samples = [self._sample(request, index) for index in range(request.num_samples)]
            pending = PendingRequest(request.request_id, samples)
            try:
                scheduler.submit(pending)
                return await asyncio.wrap_future(pending.result)
            finally:
                if pending.result.cancelled():  # the caller was cancelled, or gave up
                    scheduler.abort(request.request_id)

    async def abort(self, request_id: str | None = None) -> None:
        self._alive().abort(request_id)

    async def connect(self, transport: str, rendezvous: dict[str, Any]) -> None:
        self._alive()
        previous = self._receivers.pop(transport, None)
        if previous is not None:
            previous.close()
        # In a thread: it waits for the trainers, and this engine must be able to end if they never come.
        opening = asyncio.to_thread(open_receiver, transport, rendezvous)
        self._receivers[transport] = await self._sync_call("connect", opening)

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

    # ------------------------------------------------------------------------------------------------- see EngineHooks
    def _alive(self) -> DecodeScheduler:
        if self._scheduler is None:
            raise EngineError(f"{self._name} is not running; call start first")
        return self._scheduler

    async def _is_alive(self) -> bool:
        return self._scheduler is not None and self._scheduler.is_alive

    async def _freeze(self, mode: PauseMode) -> None:
        """Between two tokens."""
        await self._bounded(f"pause({mode})", asyncio.wrap_future(self._alive().pause(mode)))

    async def _thaw(self) -> None:
        self._alive().resume()

    async def _begin_update(self) -> None:
        self._arrivals = Arrivals()

    async def _update(self, bucket: BucketMetadata) -> None:
        await self._sync_call("update", asyncio.to_thread(self._load_bucket, bucket))

    async def _received(self) -> tuple[dict[str, int], float]:
        return self._arrivals.checksums, self._arrivals.hash_s

    async def _finish_update(self, version: int) -> None:
        """There is nothing to flush: the scheduler recomputes every cache when its version changes."""
        self._alive().set_version(version)

    async def _give_memory_back(self, parts: Sequence[MemoryPart]) -> None:
        """Caches go with their requests."""
        if "weights" in parts:
            await asyncio.to_thread(self._move, "cpu")

    async def _take_memory(self, parts: Sequence[MemoryPart]) -> None:
        if "weights" in parts:
            await asyncio.to_thread(self._move, _device())

    # -------------------------------------------------------------------------------------------------------- helpers
    def _load(self) -> DecodeScheduler:
        from transformers import AutoModelForCausalLM

        from rollout.transformers.attention import GROUPED_SDPA, register
        from rollout.transformers.scheduler import DecodeScheduler

        register()
        if not torch.cuda.is_available():
            use_onednn()
            keep_freed_memory()
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
        kernels = kernels_are_used(self._config.trainer.cpu_kernels)
        return DecodeScheduler(model, int(arguments.get("max_batch_size", _MAX_BATCH_SIZE)), kernels)

    def _move(self, device: str) -> None:
        from rollout.transformers.weights import destinations

        self._model.to(device)
        self._destinations = destinations(self._model)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def _load_bucket(self, bucket: BucketMetadata) -> None:
        """Copy every tensor into the model, and hash it on the way."""
        from rollout.transformers.weights import destination

        receiver = self._receivers.get(bucket.transport)
        if receiver is None:
            raise WeightSyncError(f"{self._name}: transport {bucket.transport} is not connected; call connect first")
        tensors = receiver.receive(bucket)
        self._arrivals.load(bucket.entries, tensors, lambda name: destination(name, self._destinations))
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
            wants_prompt_logprobs=request.prompt_logprobs,
        )


def _device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"
