"""Keys and values, or recurrent states, of the rows that decode together, in buffers written in place.

Contexts are right-aligned: all rows end at the same column, and shorter ones begin later. A new token adds one column,
the last row overwrites a finished one, and a joining row is written after the others. Layers with linear attention have
the states after a row's last token instead; masked columns leave them at 0.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, DynamicCache
from transformers.cache_utils import CacheLayerMixin, DynamicLayer, LinearAttentionLayer

_SPARE_COLUMNS = 64


@dataclass(slots=True)
class Extent:
    """Used part of all layers' buffers: the first ``rows`` rows and the first ``width`` columns."""

    rows: int = 0
    width: int = 0


class BufferLayer(CacheLayerMixin):
    """One layer with buffers ``keys`` and ``values``, (rows, kv_heads, columns, head_dim)."""

    keys: Tensor
    values: Tensor

    def __init__(self, extent: Extent, keys: Tensor, values: Tensor) -> None:
        super().__init__()
        self._extent = extent
        self.lazy_initialization(keys, values)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.keys, self.values = (s.new_empty((0, s.shape[1], 0, s.shape[3])) for s in (key_states, value_states))
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append states (rows, kv_heads, n, head_dim) after the used columns; return views of all used columns."""
        rows, start, end = self._extent.rows, self._extent.width, self._extent.width + key_states.shape[2]
        self.keys[:rows, :, start:end] = key_states
        self.values[:rows, :, start:end] = value_states
        return self.keys[:rows, :, :end], self.values[:rows, :, :end]

    def resize(self, rows: int, columns: int, used: int, width: int) -> None:
        """Move the last ``used`` columns into buffers of ``rows`` by ``columns``, where they end at ``width``."""
        self.keys = self._moved(self.keys, rows, columns, used, width)
        self.values = self._moved(self.values, rows, columns, used, width)

    def write_rows(self, first: int, keys: Tensor, values: Tensor) -> None:
        """Write states (n, kv_heads, w, head_dim) into the rows from ``first``, right-aligned."""
        rows, start, end = slice(first, first + len(keys)), self._extent.width - keys.shape[2], self._extent.width
        for buffer, states in ((self.keys, keys), (self.values, values)):
            buffer[rows, :, :start] = 0.0  # hidden columns are multiplied by 0, so they must not be NaN
            buffer[rows, :, start:end] = states

    def move_rows(self, sources: Tensor, destinations: Tensor) -> None:
        width = self._extent.width
        self.keys[destinations, :, :width] = self.keys[sources, :, :width]
        self.values[destinations, :, :width] = self.values[sources, :, :width]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._extent.width + query_length, 0

    def get_seq_length(self) -> int:
        return self._extent.width

    def get_max_length(self) -> int:
        return -1

    def _moved(self, states: Tensor, rows: int, columns: int, used: int, width: int) -> Tensor:
        moved = states.new_empty((rows, states.shape[1], columns, states.shape[3]))
        old = self._extent
        moved[: old.rows, :, : width - used] = 0.0  # as in write_rows
        moved[: old.rows, :, width - used : width] = states[: old.rows, :, old.width - used : old.width]
        return moved


class StateLayer(LinearAttentionLayer):
    """One layer's states of convolution and recurrence, (rows, ...)."""

    def __init__(self) -> None:
        super().__init__()
        self.has_previous_state[0] = True

    def join(self, prefilled: Sequence[LinearAttentionLayer], index: Tensor) -> None:
        for states, parts in (
            (self.conv_states, [part.conv_states[0] for part in prefilled]),
            (self.recurrent_states, [part.recurrent_states[0] for part in prefilled]),
        ):
            joining = torch.cat(parts)[index]
            states[0] = joining if states[0] is None else torch.cat((states[0], joining))

    def keep(self, order: list[int]) -> None:
        for states in (self.conv_states, self.recurrent_states):
            states[0] = states[0][order]


def empty_cache(kinds: Sequence[str]) -> Cache:
    """Return the cache of a prefill, for layers of these kinds; all have attention if there are none."""
    # Without the model's configuration, layers keep all columns. A sliding window's mask hides the old ones.
    if "linear_attention" not in kinds:
        return DynamicCache()
    return Cache(layers=[LinearAttentionLayer() if kind == "linear_attention" else DynamicLayer() for kind in kinds])


class KeyValueCache:
    """All layers of a batch. The arguments are the same as for ``join``.

    Attributes:
        buffers: keys and values, by the layers' indices.
        states: recurrent and convolution states of layers with linear attention.
        layers: the same as the model's ``past_key_values``.
        lengths: (rows,) int64, cached tokens of each row.
    """

    def __init__(self, prefilled: Sequence[Cache], index: Tensor, lengths: Tensor) -> None:
        self._extent = Extent()
        self.buffers: dict[int, BufferLayer] = {}
        self.states: dict[int, StateLayer] = {}
        for number, layer in enumerate(prefilled[0].layers):
            if isinstance(layer, LinearAttentionLayer):
                self.states[number] = StateLayer()
            else:
                self.buffers[number] = BufferLayer(self._extent, layer.keys, layer.values)
        every = self.buffers | self.states
        self.layers = Cache(layers=[every[number] for number in sorted(every)])
        self._first = next(iter(self.buffers.values()))
        self.lengths = lengths[:0]
        self.join(prefilled, index, lengths)

    def join(self, prefilled: Sequence[Cache], index: Tensor, lengths: Tensor) -> None:
        """Add rows.

        Args:
            prefilled: caches of the same width, whose rows are right-aligned contexts.
            index: (n,) int64, the row of the concatenated caches for each new row.
            lengths: (n,) int64, tokens of each new row's context.
        """
        first, rows = self._extent.rows, self._extent.rows + len(index)
        width = max(self._extent.width, prefilled[0].get_seq_length())
        if rows > self._first.keys.shape[0] or width > self._extent.width:
            self._resize(rows, self._extent.width, width)
        self._extent.rows = rows
        for number, buffer in self.buffers.items():
            keys = torch.cat([part.layers[number].keys for part in prefilled])
            values = torch.cat([part.layers[number].values for part in prefilled])
            buffer.write_rows(first, keys[index], values[index])
        for number, states in self.states.items():
            states.join([part.layers[number] for part in prefilled], index)
        self.lengths = torch.cat((self.lengths, lengths))

    def begin_token(self) -> tuple[Tensor, Tensor]:
        """Make room for one token per row; return mask (rows, width + 1) and positions (rows, 1), int64."""
        if self._extent.width == self._first.keys.shape[2]:
            longest = int(self.lengths.max())  # finished rows may have been longer
            self._resize(self._extent.rows, longest, longest)
        width = self._extent.width
        positions = self.lengths[:, None]
        columns = torch.arange(width + 1, device=positions.device)
        return (columns >= width - positions).long(), positions

    def end_token(self) -> None:
        """Count the token, after every layer has written it."""
        self._extent.width += 1
        self.lengths = self.lengths + 1

    def keep(self, kept: Sequence[int]) -> list[int]:
        """Drop all rows except ``kept``, and fill gaps from the end. Return the earlier row of each remaining row."""
        rows = len(kept)
        gaps, late = sorted(set(range(rows)) - set(kept)), [row for row in kept if row >= rows]
        order = list(range(rows))
        for gap, row in zip(gaps, late, strict=True):
            order[gap] = row
        if gaps:
            device = self.lengths.device
            for buffer in self.buffers.values():
                buffer.move_rows(torch.tensor(late, device=device), torch.tensor(gaps, device=device))
        for states in self.states.values():
            states.keep(order)
        self._extent.rows = rows
        self.lengths = self.lengths[order]
        return order

    def _resize(self, rows: int, used: int, width: int) -> None:
        for buffer in self.buffers.values():
            buffer.resize(rows, width + max(_SPARE_COLUMNS, width // 2), used, width)
        self._extent.width = width
