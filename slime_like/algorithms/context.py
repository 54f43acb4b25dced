"""Split of a pack over context-parallel ranks, and its exact inverse.

There are two layouts. *Zigzag* pads every sequence to a multiple of ``2 * cp`` and cuts it into ``2 * cp`` chunks; rank
r holds chunks r and ``2 * cp - 1 - r``, which balances causal work (ring attention, Transformer Engine). *Contiguous*
cuts the whole packed axis into cp equal parts (all-gather attention) and pads only the total.

With ``cp = 1``, zigzag pads no sequence either: both layouts hold the pack unchanged, with padding for ``multiple_of``
at its end.
"""

import math
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from slime_like.algorithms.packing.pack import response_logit_index
from slime_like.algorithms.packing.prefixes import segment_sources
from slime_like.trajectory import PackedTrajectory

Layout = Literal["zigzag", "contiguous"]


@dataclass(slots=True)
class ContextShard:
    """One context-parallel rank's part of a pack. T_local is the same on every rank.

    Attributes:
        tokens: (T_local,) int64; 0 in padding that the layout added.
        position_ids: (T_local,) int32, from 0 in every sequence, moved along with the tokens.
        source: (T_local,) int64, each local token's index in the pack (the first one for a shared token); -1 in padding
            that the layout added.
        cu_seqlens: (S+1,) int32, true global boundaries of the real sequences.
        cu_seqlens_padded: int32, global boundaries of the padded sequences (segments, if they share prefixes) and, at
            the end, of the padding segment if there is one. Attention and rotary embedding use these: padding follows
            its sequence, so causal attention over the padded sequence is exact on the real tokens.
        max_seqlen_padded: length of the longest padded segment, global.
        parents: int64, the segment that each one continues, -1 for none; ``None`` if sequences share nothing.
        response_index: (R_local,) int64, local positions whose logits score a response token. A shared position may
            occur several times.
        response_slot: (R_local,) int64, the place of each in the pack's (R,) response order.
        num_responses: R of the whole pack.
        layout, cp_size, cp_rank: arguments that made this shard.
    """

    tokens: Tensor
    position_ids: Tensor
    source: Tensor
    cu_seqlens: Tensor
    cu_seqlens_padded: Tensor
    max_seqlen_padded: int
    parents: Tensor | None
    response_index: Tensor
    response_slot: Tensor
    num_responses: int
    layout: Layout
    cp_size: int
    cp_rank: int

    def scatter(self, local_values: Tensor) -> Tensor:
        """Place local values among zeros, so that all shards add up to the whole. Differentiable.

        Args:
            local_values: (R_local,) or (R_local, ...), in the order of ``response_index``.

        Returns:
            (R,) or (R, ...).
        """
        whole = local_values.new_zeros((self.num_responses, *local_values.shape[1:]))
        return whole.index_copy(0, self.response_slot, local_values)


def split_for_context_parallel(
    packed: PackedTrajectory, cp_size: int, cp_rank: int, layout: Layout = "zigzag", multiple_of: int = 1
) -> ContextShard:
    """Take one rank's part of a pack, with the padding that the layout needs.

    Args:
        packed: the whole pack, the same on every context-parallel rank.
        cp_size, cp_rank: size of the context-parallel group, and this rank's place in it.
        layout: ``"zigzag"`` or ``"contiguous"``.
        multiple_of: T_local becomes a multiple of this, by padding (tensor-parallel size with sequence parallelism).

    Returns:
        The shard. ``merge_from_context_parallel`` over all shards is the exact inverse for per-response values.

    Raises:
        ValueError: an unknown layout, or a rank outside the group.
    """
    _require_layout(layout)
    if not 0 <= cp_rank < cp_size:
        raise ValueError(f"cp_rank={cp_rank} is not in a group of cp_size={cp_size}; use 0 to {cp_size - 1}")
    true_lengths, padded_lengths = _segment_lengths(packed, cp_size, layout, multiple_of)
    cu_padded = torch.cat([padded_lengths.new_zeros(1), padded_lengths.cumsum(0)])
    segment, offset = _local_coordinates(cu_padded, cp_size, cp_rank, layout)
    true_starts = true_lengths.cumsum(0) - true_lengths
    inside = offset < true_lengths[segment]
    place = torch.where(inside, true_starts[segment] + offset, -1)
    index, slot = _responses(packed, place)
    source = _sources(packed, place)
    if (parents := packed.segment_parents) is not None:
        parents = torch.nn.functional.pad(parents, (0, len(padded_lengths) - len(parents)), value=-1)
    return ContextShard(
        tokens=torch.where(inside, packed.tokens[source.clamp_min(0)], 0),
        position_ids=torch.where(inside, packed.position_ids[source.clamp_min(0)], offset.to(torch.int32)),
        source=source,
        cu_seqlens=packed.cu_seqlens,
        cu_seqlens_padded=cu_padded.to(torch.int32),
        max_seqlen_padded=int(padded_lengths.max()),
        parents=parents,
        response_index=index,
        response_slot=slot,
        num_responses=packed.targets.numel(),
        layout=layout,
        cp_size=cp_size,
        cp_rank=cp_rank,
    )


def _responses(packed: PackedTrajectory, place: Tensor) -> tuple[Tensor, Tensor]:
    """Return local positions that score response tokens, and their slots. ``place`` is -1 for padding."""
    scoring = response_logit_index(packed)
    if packed.segment_places is not None:
        scoring = packed.segment_places[scoring]
    local = place.new_full((packed.packed_seq_len + 1,), -1)
    local[place] = torch.arange(len(place), device=place.device)
    local[-1] = -1  # padding
    found = local[scoring]
    slot = (found >= 0).nonzero().squeeze(1)
    return found[slot], slot


def _sources(packed: PackedTrajectory, place: Tensor) -> Tensor:
    if packed.segment_lengths is None:
        return place
    padding = torch.arange(packed.actual_total_tokens, packed.packed_seq_len + 1, device=place.device)
    padding[-1] = -1
    return torch.cat([segment_sources(packed), padding])[place]


def padded_length(length: int, cp_size: int, layout: Layout = "zigzag") -> int:
    """Return the tokens that a sequence of ``length`` occupies under a layout, which partitioning counts.

    It is ``length``, rounded up to a multiple of ``2 * cp_size`` if zigzag has more than one rank.

    Raises:
        ValueError: an unknown layout.

    Example:
        >>> padded_length(9, cp_size=2)
        12
    """
    _require_layout(layout)
    if layout == "contiguous" or cp_size == 1:
        return length
    return -(-length // (2 * cp_size)) * 2 * cp_size


def _require_layout(layout: str) -> None:
    if layout not in get_args(Layout):
        raise ValueError(f"unknown context-parallel layout {layout!r}; use 'zigzag' or 'contiguous'")


def _segment_lengths(packed: PackedTrajectory, cp_size: int, layout: Layout, multiple_of: int) -> tuple[Tensor, Tensor]:
    """Return true and padded length of every sequence and, at the end, of the padding segment if there is one."""
    shared = packed.segment_lengths
    true_lengths = packed.prompt_lens + packed.response_lens if shared is None else shared
    chunks = 2 * cp_size if layout == "zigzag" and cp_size > 1 else 1
    padded = torch.div(true_lengths + chunks - 1, chunks, rounding_mode="floor") * chunks
    tail = packed.packed_seq_len - packed.actual_total_tokens
    used = int(padded.sum())
    # Padded sequences are multiples of `chunks`, so if the total is one, the tail is one too.
    unit = math.lcm(chunks, cp_size * multiple_of)
    padded_tail = -(-(used + tail) // unit) * unit - used
    if padded_tail == 0:
        return true_lengths, padded
    return (
        torch.cat([true_lengths, true_lengths.new_tensor([tail])]),
        torch.cat([padded, padded.new_tensor([padded_tail])]),
    )


def places(cu_padded: Tensor, cp_size: int, cp_rank: int, layout: Layout) -> Tensor:
    """Return the (T_local,) int64 places of a rank's tokens on the whole padded axis."""
    segment, offset = _local_coordinates(cu_padded, cp_size, cp_rank, layout)
    return cu_padded[segment] + offset


def _local_coordinates(cu_padded: Tensor, cp_size: int, cp_rank: int, layout: Layout) -> tuple[Tensor, Tensor]:
    """Return (T_local,) segment indices and offsets in the padded segment of every local token."""
    lengths = cu_padded.diff()
    if layout == "contiguous":
        total = int(cu_padded[-1]) // cp_size
        position = torch.arange(cp_rank * total, (cp_rank + 1) * total, device=cu_padded.device)
        segment = torch.searchsorted(cu_padded, position, right=True) - 1
        return segment, position - cu_padded[segment]
    local_lengths = torch.div(lengths, cp_size, rounding_mode="floor")
    segment = torch.arange(lengths.numel(), device=cu_padded.device).repeat_interleave(local_lengths)
    local_starts = local_lengths.cumsum(0) - local_lengths
    local_offset = torch.arange(segment.numel(), device=cu_padded.device) - local_starts[segment]
    if cp_size == 1:
        return segment, local_offset
    chunk = torch.div(local_lengths, 2, rounding_mode="floor")[segment]
    # The first half is chunk `rank` counted from the front, the second chunk `rank` counted from the back.
    front = cp_rank * chunk + local_offset
    back = (2 * cp_size - 1 - cp_rank) * chunk + local_offset - chunk
    return segment, torch.where(local_offset < chunk, front, back)
