"""A rollout engine in one file: a Hugging Face model on a CPU, one token of one request at a time."""

import asyncio
import random
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from rollout.base import EngineBase
from rollout.requests import sample_seed, stop_ids
from rollout.transformers.samples import Sample, draw_tokens
from rollout.transformers.weights import destination, destinations
from slime_like.config import RunConfig
from slime_like.interfaces import BucketMetadata, Generation, GenerationRequest, PauseMode


class PlainEngine(EngineBase[Any]):
    """Recomputes the whole context for every token: slow, and nothing to flush."""

    def __init__(self, config: RunConfig, engine_index: int) -> None:
        super().__init__(config, engine_index, "plain")
        self._model: Any = None
        self._frozen = False
        self._aborted: set[str] = set()

    async def _start(self) -> None:
        model = self._config.model
        self._model = AutoModelForCausalLM.from_pretrained(model.path, dtype=getattr(torch, model.dtype))
        self._model.requires_grad_(False)
        self._frozen = False

    async def stop(self) -> None:
        self._model = None
        self.receiver.close()

    def _alive(self) -> Any:
        if self._model is None:
            raise self._faults.not_running()
        return self._model

    async def _ping(self) -> None:
        self._alive()

    async def generate(self, request: GenerationRequest) -> list[Generation]:
        async with self._promising(request):
            try:
                return await asyncio.gather(*(self._generate_one(request, i) for i in range(request.num_samples)))
            finally:
                self._aborted.discard(request.request_id)

    async def _generate_one(self, request: GenerationRequest, index: int) -> Generation:
        seed = None if request.seed is None else sample_seed(request.seed, index)
        stops = frozenset(stop_ids(request.sampling, self._dimensions))
        stream = random.Random(seed)
        texts = self._stop_texts if request.sampling.stop else None
        sample = Sample(list(request.prompt.token_ids), request.sampling, stops, stream, request.prompt_logprobs, texts)
        while sample.finish_reason is None:
            await asyncio.sleep(0.001 if self._frozen else 0)  # other requests and calls take their turn
            if request.request_id in self._aborted:
                sample.finish_reason = "abort"
            elif not self._frozen:
                self._add_token(sample)
        return sample.to_generation()

    def _add_token(self, sample: Sample) -> None:
        """Blocks the event loop for one token; a real engine computes in a thread or process."""
        logits = self._alive()(torch.tensor([sample.context])).logits[0].float()
        if sample.is_to_score:
            targets = torch.tensor(sample.prompt[1:])
            sample.prompt_logprobs = logits[:-1].log_softmax(-1).gather(1, targets[:, None])[:, 0].numpy()
        (token,), (logprob,) = draw_tokens(logits[-1:], [sample])  # over the whole vocabulary
        sample.append(token, logprob, self._state.version)

    async def _freeze(self, mode: PauseMode) -> None:
        if mode == "abort":
            self._aborted.update(self._promised)
            while self._promised:
                await asyncio.sleep(0.001)
        self._frozen = True

    async def _thaw(self) -> None:
        self._frozen = False

    async def _update(self, bucket: BucketMetadata) -> None:
        places = destinations(self._model)
        self.receiver.load(bucket, lambda name: destination(name, places))

    async def _finish_update(self, version: int) -> None:
        """A cache would be flushed here."""
