"""A plain Hugging Face model: slow, but it needs only transformers.

It runs inside the process that owns it, and decodes in a thread, so the event loop stays free.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rollout.base import EngineBase, MemoryPart
from rollout.limits import on_cpu
from rollout.requests import sample_seed, stop_ids
from rollout.transformers import weights
from rollout.transformers.limits import LIMITS
from rollout.transformers.samples import Sample
from slime_like.config import RunConfig
from slime_like.errors import EngineError
from slime_like.interfaces import BucketMetadata, Generation, GenerationRequest, PauseMode
from slime_like.models.tower import language_names, loading_options
from slime_like.system.processes import keep_freed_memory
from slime_like.weights.quantization import dequantize_bucket

if TYPE_CHECKING:
    from rollout.transformers.scheduler import DecodeScheduler

_STOP_TIMEOUT_S = 10.0
_MAX_BATCH_SIZE = 512
_LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})  # the cache keeps keys and values by column


class TransformersEngine(EngineBase["DecodeScheduler"]):
    """One model in this process.

    ``rollout.engine_args``: ``attn_implementation``, and ``max_batch_size`` in sequences.
    """

    limits = LIMITS
    serve_adapter = "transformers.weights:serve_adapter"
    returns_supports = True
    returns_routes = True

    def __init__(self, config: RunConfig, engine_index: int) -> None:
        super().__init__(config, engine_index, "transformers")
        self._unseeded = random.Random(config.seed * 1_000_003 + engine_index)
        self.model: Any = None
        self._destinations: dict[str, Tensor] = {}
        self._own_names = language_names(config.model.path, self.expected)
        self._scheduler: DecodeScheduler | None = None

    async def _start(self) -> None:
        try:
            self._scheduler = await asyncio.to_thread(self._load)
        except (OSError, ValueError, RuntimeError, ImportError) as error:
            raise self._faults.start_failed(f"{type(error).__name__}: {error}") from error

    async def generate(self, request: GenerationRequest) -> list[Generation]:
        async with self._promising(request) as scheduler:
            samples = [self._sample(request, index) for index in range(request.num_samples)]
            result = scheduler.submit(request.request_id, samples, request.batch)
            try:
                return await asyncio.wrap_future(result)
            finally:
                if result.cancelled():  # the caller was canceled, or gave up
                    scheduler.abort(request.request_id)

    async def stop(self) -> None:
        scheduler, self._scheduler = self._scheduler, None
        if scheduler is not None:
            ended = await asyncio.to_thread(scheduler.stop, _STOP_TIMEOUT_S)
            if not ended:
                problem = f"the decode thread did not end within {_STOP_TIMEOUT_S:g} s"
                raise EngineError(problem, code="engine-timeout", who=self._name)
        self.receiver.close()
        self.model, self._destinations = None, {}

    # ------------------------------------------------------------------------------------------------- see EngineHooks
    def _alive(self) -> DecodeScheduler:
        if self._scheduler is None:
            raise self._faults.not_running()
        return self._scheduler

    async def _ping(self) -> None:
        if not self._alive().is_alive:
            raise self._faults.died()

    async def _freeze(self, mode: PauseMode) -> None:
        await asyncio.wrap_future(self._alive().pause(mode))

    async def _thaw(self) -> None:
        self._alive().resume()

    async def _update(self, bucket: BucketMetadata) -> None:
        await asyncio.to_thread(self._load_bucket, bucket)

    async def _finish_update(self, version: int) -> None:
        """Set the version, for which the scheduler recomputes every cache."""
        self._alive().set_version(version)

    async def _give_memory_back(self, parts: Sequence[MemoryPart], keep_weights: bool) -> None:
        """Move the weights to host memory. Caches were freed with their requests."""
        if "weights" in parts:
            await asyncio.to_thread(self._move, "cpu")

    async def _take_memory(self, parts: Sequence[MemoryPart]) -> None:
        if "weights" in parts:
            await asyncio.to_thread(self._move, _device())

    # -------------------------------------------------------------------------------------------------------- helpers
    def _load(self) -> DecodeScheduler:
        from transformers import AutoModelForCausalLM

        from rollout.transformers.decoding import GROUPED_SDPA, Routers, register_grouped_sdpa
        from rollout.transformers.scheduler import DecodeScheduler

        register_grouped_sdpa()
        if on_cpu():
            keep_freed_memory()
        arguments = self._config.rollout.own_engine_args
        attention = "eager" if self._dimensions.attention.sinks else GROUPED_SDPA
        model = AutoModelForCausalLM.from_pretrained(
            self._config.model.path,
            dtype=getattr(torch, self._config.model.dtype),
            attn_implementation=arguments.get("attn_implementation", attention),
            trust_remote_code=self._config.model.trust_remote_code,
            **loading_options(self._config.model.path, self._config.model.trust_remote_code),
        )
        recurrent = {"linear_attention"} if self._dimensions.attention.linear is not None else set()
        others = set(getattr(model.config, "layer_types", None) or ()) - _LAYER_TYPES - recurrent
        if others:
            known = " and ".join(sorted(_LAYER_TYPES))
            problem, who = f"layers of type {', '.join(sorted(others))}", str(self._config.model.path)
            remedy = f"use rollout.engine=vllm, because the transformers engine supports only {known}"
            raise EngineError(problem, code="model-not-served", who=who, remedy=remedy)
        self.model = model.eval().requires_grad_(False)
        weights.keep_router_biases(model)
        self._move(_device())
        routers = Routers(model, self._dimensions.expert_layers) if self._records_routes else None
        return DecodeScheduler(model, int(arguments.get("max_batch_size", _MAX_BATCH_SIZE)), routers)

    def _move(self, device: str) -> None:
        self.model.to(device)
        self._destinations = weights.destinations(self.model)
        if not on_cpu():
            torch.cuda.empty_cache()

    def _load_bucket(self, bucket: BucketMetadata) -> None:
        def destination(name: str) -> Tensor:
            return weights.destination(self._own_names.get(name, name), self._destinations)

        if self._quantized:
            for name, tensor in dequantize_bucket(self.receiver.copies(bucket, _device())):
                destination(name).copy_(tensor)
        else:
            self.receiver.load(bucket, destination)
        if not on_cpu():
            torch.cuda.current_stream().synchronize()  # now the sender may reuse the bucket's memory

    def _sample(self, request: GenerationRequest, index: int) -> Sample:
        seed = self._unseeded.getrandbits(62) if request.seed is None else sample_seed(request.seed, index)
        return Sample(
            prompt=list(request.prompt.token_ids),
            sampling=request.sampling,
            stop_ids=frozenset(stop_ids(request.sampling, self._dimensions)),
            stream=random.Random(seed),
            wants_prompt_logprobs=request.prompt_logprobs,
            stop_texts=self._stop_texts if request.sampling.stop else None,
            wants_routes=self._records_routes and request.sampling.training,
        )


def _device() -> str:
    return "cpu" if on_cpu() else "cuda"
