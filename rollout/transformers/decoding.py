"""Batched decoding of a plain Hugging Face model: left padding, a KV cache, one token per row and step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache

from rollout.transformers.samples import Sample, draw_tokens

_PREFILL_TOKENS = 16384
"""Tokens of one prefill forward, padding included; bounds its memory."""


class DecodeBatch:
    """Samples that step together. Finished rows leave at once; new samples form a batch of their own."""

    def __init__(self, model: Any, samples: Sequence[Sample]) -> None:
        self._model = model
        self.samples = list(samples)
        self._cache: DynamicCache | None = None
        self._mask = torch.empty(0)

    def step(self, version: int) -> None:
        """Sample one token for every row. ``version`` is that of the weights in the model now."""
        with torch.inference_mode():
            logits = self._prefill() if self._cache is None else self._decode()
            tokens, logprobs = draw_tokens(logits, self.samples)
        for sample, token, logprob in zip(self.samples, tokens, logprobs, strict=True):
            sample.append(token, logprob, version)
        self.drop_finished()

    def drop_finished(self) -> None:
        kept = [row for row, sample in enumerate(self.samples) if sample.finish_reason is None]
        if len(kept) == len(self.samples):
            return
        self.samples = [self.samples[row] for row in kept]
        if self._cache is not None and kept:
            rows = torch.tensor(kept, device=self._mask.device)
            self._cache.batch_select_indices(rows)
            self._mask = self._mask[rows]

    def forget_cache(self) -> None:
        """The next step recomputes everything from the tokens: for weights that have changed."""
        self._cache = None

    def _prefill(self) -> Tensor:
        """(B, V) logits after every sample's context. Equal contexts (samples of one prompt) are computed once."""
        contexts = [tuple(sample.context) for sample in self.samples]
        unique = list(dict.fromkeys(contexts))
        width = max(map(len, unique))
        ids, mask = _left_padded(unique, width, self._model.device)
        rows = max(1, _PREFILL_TOKENS // width)
        parts = [self._prefill_rows(i, m) for i, m in zip(ids.split(rows), mask.split(rows), strict=True)]
        logits, cache = torch.cat([part[0] for part in parts]), _concatenated([part[1] for part in parts])
        place = {context: row for row, context in enumerate(unique)}
        index = torch.tensor([place[context] for context in contexts], device=self._model.device)
        cache.batch_select_indices(index)
        self._cache, self._mask = cache, mask[index]
        return logits[index]

    def _prefill_rows(self, ids: Tensor, mask: Tensor) -> tuple[Tensor, DynamicCache]:
        positions = (mask.cumsum(dim=1) - 1).clamp_min(0)
        return self._forward(ids, mask, positions, DynamicCache(config=self._model.config))

    def _decode(self) -> Tensor:
        assert self._cache is not None
        last = torch.tensor([[sample.token_ids[-1]] for sample in self.samples], device=self._model.device)
        self._mask = torch.cat((self._mask, torch.ones_like(self._mask[:, :1])), dim=1)
        positions = self._mask.sum(dim=1, keepdim=True) - 1
        return self._forward(last, self._mask, positions, self._cache)[0]

    def _forward(
        self, ids: Tensor, mask: Tensor, positions: Tensor, cache: DynamicCache
    ) -> tuple[Tensor, DynamicCache]:
        output = self._model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        return output.logits[:, -1], cache


def prompt_logprobs(model: Any, prompt: Sequence[int]) -> np.ndarray:
    """(len(prompt) - 1,) float32 teacher-forced logprobs at temperature 1."""
    with torch.inference_mode():
        ids = torch.tensor([list(prompt)], device=model.device)
        logprobs = model(input_ids=ids, use_cache=False).logits[0, :-1].float().log_softmax(dim=-1)
        return logprobs.gather(1, ids[0, 1:, None])[:, 0].cpu().numpy()


def _left_padded(contexts: Sequence[tuple[int, ...]], width: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """(B, width) ids and 0/1 mask, contexts flush right. The padding's id is never looked at."""
    ids = torch.zeros((len(contexts), width), dtype=torch.int64)
    mask = torch.zeros((len(contexts), width), dtype=torch.int64)
    for row, context in enumerate(contexts):
        ids[row, width - len(context) :] = torch.tensor(context)
        mask[row, width - len(context) :] = 1
    return ids.to(device), mask.to(device)


def _concatenated(caches: Sequence[DynamicCache]) -> DynamicCache:
    """One cache of all rows; the parts have the same width."""
    whole = caches[0]
    for index, layer in enumerate(whole.layers if len(caches) > 1 else ()):
        layer.keys = torch.cat([cache.layers[index].keys for cache in caches])
        layer.values = torch.cat([cache.layers[index].values for cache in caches])
    return whole
