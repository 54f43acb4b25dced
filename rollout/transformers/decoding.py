"""Batched decoding of a plain Hugging Face model: left padding, a KV cache, one token per row and step.

Also the attention of such steps, and hooks that record the experts of each token.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface, Cache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from rollout.transformers.kv_cache import KeyValueCache, empty_cache
from rollout.transformers.samples import Sample, draw_tokens

GROUPED_SDPA = "grouped_sdpa"
"""Name for ``attn_implementation``."""

_PREFILL_TOKENS = 16384
"""Tokens in one prefill pass, including padding; bounds its memory."""
_SCORED_TOKENS = 512
"""The same limit if logits of every position are needed."""


class Routers:
    """Choices of the routers in ``layers``, by layer, in the passes since the last ``take``."""

    def __init__(self, model: Any, layers: range) -> None:
        self._chosen: list[list[Tensor]] = [[] for _ in layers]
        for layer, chosen in zip(layers, self._chosen, strict=True):
            mlp = model.get_submodule(f"model.layers.{layer}.mlp")
            router = mlp.router if hasattr(mlp, "router") else mlp.gate
            router.register_forward_hook(lambda _, __, output, kept=chosen: kept.append(output[2]))

    def take(self, rows: int) -> np.ndarray:
        """Return int16 ids (rows, columns, layers, choices) of passes with ``rows`` rows in total."""
        chosen = torch.stack([torch.cat(parts) for parts in self._chosen], dim=1).to("cpu", torch.int16)
        for parts in self._chosen:
            parts.clear()
        return chosen.view(rows, -1, *chosen.shape[1:]).numpy()


class DecodeBatch:
    """Samples that step together. Finished rows leave immediately; added samples join with the next step."""

    def __init__(self, model: Any, routers: Routers | None = None) -> None:
        self._model = model
        self._routers = routers
        self.samples: list[Sample] = []  # rows of the cache, followed by samples waiting for their prefill
        self._cache: KeyValueCache | None = None

    def add(self, samples: Sequence[Sample]) -> None:
        self.samples += samples

    def step(self, version: int) -> None:
        """Sample one token for every row. ``version`` is the model's current weight version."""
        with torch.inference_mode():
            rows = 0 if self._cache is None else len(self._cache.lengths)
            logits = [self._decode(self._cache)] if self._cache is not None else []
            waiting = sorted(self.samples[rows:], key=lambda sample: not sample.is_to_score)
            self.samples[rows:] = waiting
            scored = sum(sample.is_to_score for sample in waiting)
            groups = ((waiting[:scored], True), (waiting[scored:], False))
            logits += [self._prefill(group, score) for group, score in groups if group]
            tokens, logprobs = draw_tokens(torch.cat(logits), self.samples)
        for sample, token, logprob in zip(self.samples, tokens, logprobs, strict=True):
            sample.append(token, logprob, version)
        self.drop_finished()

    def drop_finished(self) -> None:
        rows = 0 if self._cache is None else len(self._cache.lengths)
        kept = [row for row, sample in enumerate(self.samples[:rows]) if sample.finish_reason is None]
        waiting = [sample for sample in self.samples[rows:] if sample.finish_reason is None]
        if self._cache is None or not kept:
            self._cache, ordered = None, []
        elif len(kept) == rows:
            ordered = self.samples[:rows]
        else:
            with torch.inference_mode():
                ordered = [self.samples[row] for row in self._cache.keep(kept)]
        self.samples = ordered + waiting

    def forget_cache(self) -> None:
        """Drop the cache, so the next step recomputes it with changed weights."""
        self._cache = None

    def _decode(self, cache: KeyValueCache) -> Tensor:
        """Return logits (rows, V) after the last token of every row in the cache."""
        last = torch.tensor([sample.token_ids[-1] for sample in self.samples[: len(cache.lengths)]])
        mask, positions = cache.begin_token()
        logits = self._forward(last[:, None].to(self._model.device), mask, positions, cache.layers)
        cache.end_token()
        if self._routers is not None:
            for sample, routes in zip(self.samples, self._routers.take(len(last)), strict=False):
                sample.routes += [routes] if sample.wants_routes else []
        return logits[:, -1]

    def _prefill(self, samples: Sequence[Sample], score: bool) -> Tensor:
        """Return logits (n, V) after the contexts of joining samples. Equal contexts are computed once.

        With ``score``, also record the prompts' logprobs.
        """
        contexts = [tuple(sample.context) for sample in samples]
        unique = list(dict.fromkeys(contexts))
        width = max(map(len, unique))
        ids, mask = _left_padded(unique, width, self._model.device)
        rows = max(1, (_SCORED_TOKENS if score else _PREFILL_TOKENS) // width)
        parts = [self._prefill_rows(i, m, score) for i, m in zip(ids.split(rows), mask.split(rows), strict=True)]
        place = {context: row for row, context in enumerate(unique)}
        index = torch.tensor([place[context] for context in contexts], device=self._model.device)
        prefilled, lengths = [part[1] for part in parts], mask.sum(dim=1)[index]
        if self._cache is None:
            self._cache = KeyValueCache(prefilled, index, lengths)
        else:
            self._cache.join(prefilled, index, lengths)
        if score:
            logprobs = [row for part in parts for row in part[2]]
            for sample, context in zip(samples, contexts, strict=True):
                before = width - len(context)  # padding
                sample.prompt_logprobs = logprobs[place[context]][before : before + len(sample.prompt) - 1]
        if self._routers is not None:
            routes = self._routers.take(len(unique))
            for sample, context in zip(samples, contexts, strict=True):
                sample.keep_routes(routes[place[context]][width - len(context) :])
        return torch.cat([part[0] for part in parts])[index]

    def _prefill_rows(self, ids: Tensor, mask: Tensor, score: bool) -> tuple[Tensor, Cache, np.ndarray]:
        """Return logits (n, V) after the last column, the cache, and, with ``score``, logprobs (n, width - 1)."""
        columns = range(ids.shape[1]) if score else (-1,)
        cache = empty_cache(getattr(self._model.config, "layer_types", None) or ())
        logits = self._forward(ids, mask, (mask.cumsum(dim=1) - 1).clamp_min(0), cache, columns)
        if not score:
            return logits[:, -1], cache, np.empty((len(ids), 0), dtype=np.float32)
        logprobs = logits[:, :-1].float().log_softmax(dim=-1).gather(2, ids[:, 1:, None])[..., 0]
        return logits[:, -1], cache, logprobs.cpu().numpy()

    def _forward(
        self, ids: Tensor, mask: Tensor, positions: Tensor, cache: Cache, columns: Sequence[int] = (-1,)
    ) -> Tensor:
        """Return logits (n, len(columns), V)."""
        output = self._model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            # An index, not a slice: with a tensor that is not contiguous, the head's product in bfloat16 on a CPU takes
            # 100 times as long in torch 2.13.
            logits_to_keep=torch.tensor(columns, device=ids.device),
        )
        return output.logits


def _left_padded(contexts: Sequence[tuple[int, ...]], width: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return right-aligned ids and their 0/1 mask, (B, width) each. Padding ids are never read."""
    ids = torch.zeros((len(contexts), width), dtype=torch.int64)
    mask = torch.zeros((len(contexts), width), dtype=torch.int64)
    for row, context in enumerate(contexts):
        ids[row, width - len(context) :] = torch.tensor(context)
        mask[row, width - len(context) :] = 1
    return ids.to(device), mask.to(device)


def grouped_sdpa(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Compute transformers' "sdpa", with a faster path for a single token and grouped heads.

    All heads of a group see the same keys, and a single new token sees every key that is not masked. So the heads of a
    group can take the place of several tokens' queries, whereas "sdpa" copies keys and values for each head. On a CPU,
    two batched matrix products are faster than the kernel for so few rows.

    Args:
        query: (B, heads, n, head_dim).
        key, value: (B, kv_heads, columns, head_dim).
        attention_mask: bool, (B, 1, n, columns), or None.

    Returns:
        Output (B, n, heads, head_dim), and None instead of the weights.
    """
    batch, heads, tokens, dim = query.shape
    if tokens != 1 or heads == key.shape[1]:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **options)
    grouped = query.reshape(batch, key.shape[1], heads // key.shape[1], dim)
    if query.device.type == "cpu":
        scale = dim**-0.5 if scaling is None else scaling
        return _products(grouped, key, value, attention_mask, scale).reshape(batch, 1, heads, value.shape[3]), None
    output = scaled_dot_product_attention(grouped, key, value, attn_mask=attention_mask, scale=scaling)
    return output.reshape(batch, 1, heads, value.shape[3]), None


def _products(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """Compute attention of queries (B, kv_heads, n, head_dim) that all see the same columns."""
    batch, groups, rows, _ = query.shape
    scores = torch.bmm(query.flatten(0, 1) * scale, key.flatten(0, 1).transpose(1, 2))
    if mask is not None:
        scores.view(batch, groups * rows, -1).masked_fill_(~mask[:, 0], -math.inf)
    return torch.bmm(scores.softmax(dim=-1), value.flatten(0, 1)).view(batch, groups, rows, value.shape[3])


def register_grouped_sdpa() -> None:
    AttentionInterface.register(GROUPED_SDPA, grouped_sdpa)
    AttentionMaskInterface.register(GROUPED_SDPA, sdpa_mask)
