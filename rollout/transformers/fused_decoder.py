"""Tokens through a plain decoder in float32 on a CPU: torch's matrix products, and kernels between them.

transformers' forward computes the same in a hundred small operators a layer, which cost a small model more than its
arithmetic. The model stays what holds the weights: they are read where they are whenever a token is computed.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, linear, scaled_dot_product_attention
from transformers import DynamicCache

from rollout.transformers.kv_cache import BufferLayer, KeyValueCache
from slime_like.cpu.kernels import decode_attention, decode_heads, rms_norm, swiglu


@dataclass(frozen=True, slots=True)
class _Token:
    """Positions of the rows' new tokens. In a prefill every token of every context is a separate row.

    Attributes:
        cos, sin: (more than any position, head_dim / 2).
        positions: (rows,), of each in its context.
        column: of the cache, for all.
    """

    cos: np.ndarray
    sin: np.ndarray
    positions: np.ndarray
    column: int


class FusedDecoder:
    """Decoder of the models that ``not_plain`` accepts."""

    def __init__(self, model: Any) -> None:
        self._embedding, self._norm, self._head = model.model.embed_tokens, model.model.norm, model.lm_head
        self._layers = [_Layer(number, layer) for number, layer in enumerate(model.model.layers)]
        self._rotary = _RotaryTable(model.model.rotary_emb)

    def logits(self, token_ids: Tensor, cache: KeyValueCache) -> Tensor:
        """(rows, V) after one more token of every row, (rows,), whose keys and values go into the cache."""
        column = cache.make_room()
        token = _Token(*self._rotary.up_to(column + 1), cache.lengths.numpy(), column)
        hidden = self._through(
            token_ids,
            [partial(layer.attention.step, token, cache.buffers[number]) for number, layer in enumerate(self._layers)],
        )
        cache.end_token()
        return _product(hidden, self._head)

    def prefill(self, ids: Tensor, mask: Tensor, columns: Sequence[int]) -> tuple[Tensor, DynamicCache]:
        """Contexts flush right, (n, w) with their 0/1 mask: logits (n, len(columns), V), and a cache of all columns."""
        rows, width = ids.shape
        positions = (mask.cumsum(dim=1) - 1).clamp_min(0).flatten()
        token = _Token(*self._rotary.up_to(width), positions.numpy(), 0)
        cache, seen = DynamicCache(), functools.cache(partial(_seen, mask))  # once for all layers of one window
        hidden = self._through(
            ids.flatten(), [partial(layer.attention.prefill, token, rows, seen, cache) for layer in self._layers]
        )
        return _product(hidden.view(rows, width, -1)[:, list(columns)], self._head), cache

    def _through(self, token_ids: Tensor, attend: Sequence[Callable[[Tensor], Tensor]]) -> Tensor:
        """(tokens, H) after all layers, whose attentions are given."""
        stream = embedding(token_ids, self._embedding.weight)
        hidden, change = torch.empty_like(stream), stream[:0]
        for layer, attention in zip(self._layers, attend, strict=True):
            _add_and_norm(stream, change, layer.attention_norm, hidden)
            change = attention(hidden)
            _add_and_norm(stream, change, layer.mlp_norm, hidden)
            change = layer.feed_forward(hidden)
        _add_and_norm(stream, change, self._norm, hidden)
        return hidden


class _Layer:
    """A decoder layer's modules, called without their forward."""

    def __init__(self, number: int, layer: Any) -> None:
        self.attention = _Attention(number, layer.self_attn)
        self.attention_norm, self.mlp_norm, self.mlp = layer.input_layernorm, layer.post_attention_layernorm, layer.mlp

    def feed_forward(self, hidden: Tensor) -> Tensor:
        """(rows, H) of the MLP of (rows, H)."""
        gate, up = _product(hidden, self.mlp.gate_proj), _product(hidden, self.mlp.up_proj)
        swiglu.forward_in_place(gate.numpy(), up.numpy())
        return _product(gate, self.mlp.down_proj)


class _Attention:
    """Attention of layer ``number``, with its projections."""

    def __init__(self, number: int, attention: Any) -> None:
        self._number = number
        self._query, self._key, self._value = attention.q_proj, attention.k_proj, attention.v_proj
        self._query_norm, self._key_norm = getattr(attention, "q_norm", None), getattr(attention, "k_norm", None)
        self._dim = attention.head_dim
        self._no_norm = np.ones(self._dim, dtype=np.float32)
        self._scale, self._window = attention.scaling, _window(attention)
        self._output = attention.o_proj

    def step(self, token: _Token, buffer: BufferLayer, hidden: Tensor) -> Tensor:
        """(rows, H) of the attention of (rows, H), after the token's keys and values have become a column."""
        query = self._heads(hidden, token, buffer.keys, buffer.values)
        mixed = torch.empty_like(query)
        decode_attention.forward(
            *(query.numpy(), buffer.keys.numpy(), buffer.values.numpy()),
            *(token.positions, token.column, self._window, self._scale, mixed.numpy()),
        )
        return _product(mixed, self._output)

    def prefill(
        self, token: _Token, rows: int, seen: Callable[[int], Tensor | None], cache: DynamicCache, hidden: Tensor
    ) -> Tensor:
        """(rows * w, H) of the causal attention of (rows * w, H), whose keys and values become the cache's."""
        tokens, dim, mask = len(hidden), self._dim, seen(self._window)
        keys, values = (torch.empty(tokens, len(m.weight) // dim, 1, dim) for m in (self._key, self._value))
        query = self._heads(hidden, token, keys, values)
        query, keys, values = (
            states.view(rows, tokens // rows, -1, dim).transpose(1, 2) for states in (query, keys, values)
        )
        cache.update(keys, values, self._number)
        group = query.shape[1] // keys.shape[1]
        mixed = scaled_dot_product_attention(
            query,
            keys.repeat_interleave(group, dim=1),
            values.repeat_interleave(group, dim=1),
            attn_mask=mask,
            is_causal=mask is None,
            scale=self._scale,
        )
        return _product(mixed.transpose(1, 2).reshape(tokens, -1), self._output)

    def _heads(self, hidden: Tensor, token: _Token, keys: Tensor, values: Tensor) -> Tensor:
        """(rows, heads * head_dim) queries; their tokens' keys and values are written into the column."""
        query, key, value = (_product(hidden, module) for module in (self._query, self._key, self._value))
        norms: tuple[np.ndarray, np.ndarray, bool, float] = self._no_norm, self._no_norm, False, 0.0
        if self._query_norm is not None:
            norms = _weight(self._query_norm), _weight(self._key_norm), True, self._query_norm.variance_epsilon
        decode_heads.forward(
            *(query.numpy(), key.numpy(), value.numpy(), *norms),
            *(token.cos, token.sin, token.positions, token.column, keys.numpy(), values.numpy()),
        )
        return query


class _RotaryTable:
    """Cosines and sines of a model's rotary embedding by position, as the model computes them."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._cos = self._sin = np.empty((0, 0), dtype=np.float32)

    def up_to(self, positions: int) -> tuple[np.ndarray, np.ndarray]:
        """(at least ``positions``, head_dim / 2) each: a head's second half is rotated by what the first one is."""
        if len(self._cos) < positions:
            tables = self._module(torch.empty(0), torch.arange(2 * positions)[None])
            self._cos, self._sin = (table[0, :, : table.shape[2] // 2].contiguous().numpy() for table in tables)
        return self._cos, self._sin


def _seen(mask: Tensor, window: int) -> Tensor | None:
    """(n, 1, w, w), which columns a token sees; none where that is every one before it, and there is no padding.

    A token of the padding sees itself, for it must see something.
    """
    if window >= mask.shape[1] and bool(mask.all()):
        return None
    columns = torch.arange(mask.shape[1])
    back = columns[:, None] - columns
    return ((back >= 0) & (back < window) & mask[:, None].bool() | (back == 0))[:, None]


def _add_and_norm(stream: Tensor, change: Tensor, norm: Any, out: Tensor) -> None:
    rms_norm.stream_forward(stream.numpy(), change.numpy(), _weight(norm), norm.variance_epsilon, out.numpy())


def _product(x: Tensor, module: Any) -> Tensor:
    return linear(x, module.weight, module.bias)


def _weight(norm: Any) -> np.ndarray:
    weight: np.ndarray = norm.weight.detach().numpy()
    return weight


def _window(attention: Any) -> int:
    """Mistral's attention looks it up in the configuration, Qwen's has a layer's own, Llama has none."""
    window = getattr(attention, "sliding_window", getattr(attention.config, "sliding_window", None))
    return sys.maxsize if window is None else int(window)
