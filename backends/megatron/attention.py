"""Packed core attention: what Megatron's attention layer calls between its projections."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from backends.common.attention.allgather import GatherSegments, allgather_attention
from backends.common.attention.kernels import Segments, kernel_for
from backends.common.attention.packed_attention import packed_attention
from backends.common.attention.ring_flash_attn import Llama3Segments, llama3_attention
from backends.common.step.packs import ResponseRows
from backends.megatron.ring import RingSegments, zigzag_ring_attention
from backends.megatron.rotary import apply_rotary


@dataclass
class PackedLayout(PackedSeqParams):
    """Layer inputs of one micro-batch besides hidden states; it travels with the micro-batch.

    Attributes:
        cos, sin: (T_local, 1, rotary_dim / 2) rotary table of the local tokens.
        interleaved: it turns neighbouring elements, not those half a head apart.
        segments: boundaries of the local tokens (no context parallelism).
        ring: boundaries of the local zigzag chunks (context parallelism around a ring).
        gather: boundaries of the local contiguous part (context parallelism by all-gather).
        llama3: the same as the package ring-flash-attn wants them.
        responses: what the head scores.
    """

    cos: Tensor | None = None
    sin: Tensor | None = None
    interleaved: bool = False
    segments: Segments | None = None
    ring: RingSegments | None = None
    gather: GatherSegments | None = None
    llama3: Llama3Segments | None = None
    responses: ResponseRows | None = None

    @staticmethod
    def given(packed_seq_params: PackedLayout | None) -> PackedLayout:
        """Check the layout that a layer was called with.

        Raises:
            ValueError: nothing, or what has no rotary table.
        """
        if packed_seq_params is None or packed_seq_params.cos is None:
            raise ValueError("attention needs the micro-batch's PackedLayout as packed_seq_params")
        return packed_seq_params

    def rotated(self, *heads: Tensor) -> tuple[Tensor, ...]:
        """Queries or keys, (T_local, heads, rotary_dim) each, turned to their positions."""
        assert self.cos is not None and self.sin is not None
        return tuple(apply_rotary(x, self.cos, self.sin, self.interleaved) for x in heads)


class PackedCoreAttention(torch.nn.Module):
    """Causal attention inside every sequence of a pack, with rotary embedding, on one rank or over the context group.

    A drop-in for Megatron's ``core_attention``. It takes (T, H, D) queries and (T, G, D) keys and values and reads
    boundaries and angles from the micro-batch's ``PackedLayout`` only.

    Attributes:
        rotates: queries and keys come without rotary embedding.
    """

    rotates: ClassVar[bool] = True

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
        **unused: Any,
    ) -> None:
        super().__init__()
        self.scale = softmax_scale if softmax_scale is not None else config.kv_channels**-0.5
        self.group: dist.ProcessGroup = pg_collection.cp

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedLayout | None = None,
    ) -> Tensor:
        """Returns (T, H * D), D being that of the values."""
        layout = PackedLayout.given(packed_seq_params)
        if self.rotates:
            query, key = layout.rotated(query, key)
        kernel = kernel_for(query.device.type)
        if layout.ring is not None:
            out = zigzag_ring_attention(query, key, value, layout.ring, self.scale, kernel, self.group)
        elif layout.gather is not None:
            out = allgather_attention(query, key, value, layout.gather, self.scale, kernel, self.group)
        elif layout.llama3 is not None:
            out = llama3_attention(query, key, value, layout.llama3, self.scale, self.group)
        elif layout.segments is not None:
            out = packed_attention(query, key, value, layout.segments, self.scale, kernel)
        else:
            raise ValueError("the micro-batch's PackedLayout has no boundaries of its sequences")
        return out.reshape(out.shape[0], -1)


class RotatedCoreAttention(PackedCoreAttention):
    """The same for queries and keys that have their rotary embedding."""

    rotates = False
