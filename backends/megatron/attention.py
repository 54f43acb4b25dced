"""Packed core attention: what Megatron's attention layer calls between its projections."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from backends.megatron.allgather import GatherSegments, allgather_attention
from backends.megatron.kernels import AttentionKernel, Segments, kernel_for
from backends.megatron.ring import RingSegments, zigzag_ring_attention
from backends.megatron.ring_flash_attn import Llama3Segments, llama3_attention
from backends.megatron.rotary import apply_rotary


@dataclass
class ResponseRows:
    """Which local hidden states predict response tokens, and what to score there.

    Attributes:
        index: (r,) int64 rows of the local token axis whose hidden state predicts a response token.
        targets: (r,) int64 token ids.
        temperatures: (r,) float64.
    """

    index: Tensor
    targets: Tensor
    temperatures: Tensor


@dataclass
class PackedLayout(PackedSeqParams):
    """Everything about one micro-batch that layers need beside hidden states; it travels with the micro-batch.

    Attributes:
        cos, sin: (T_local, 1, head_dim / 2) rotary table of the local tokens.
        segments: boundaries of the local tokens (no context parallelism).
        ring: boundaries of the local zigzag chunks (context parallelism around a ring).
        gather: boundaries of the local contiguous part (context parallelism by all-gather).
        llama3: the same as the package ring-flash-attn wants them.
        responses: what the head scores.
    """

    cos: Tensor | None = None
    sin: Tensor | None = None
    segments: Segments | None = None
    ring: RingSegments | None = None
    gather: GatherSegments | None = None
    llama3: Llama3Segments | None = None
    responses: ResponseRows | None = None


class _PackedAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, segments: Segments, scale: float, kernel: AttentionKernel
    ) -> Tensor:
        out, lse = kernel.forward(q, k, v, segments, segments, True, scale)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.setting = (segments, scale, kernel)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        segments, scale, kernel = ctx.setting
        dq, dk, dv = kernel.backward(grads[0].contiguous(), q, k, v, out, lse, segments, segments, True, scale)
        return dq, dk, dv, None, None, None


class PackedCoreAttention(torch.nn.Module):
    """Causal attention inside every sequence of a pack, with rotary embedding, on one rank or over the context group.

    A drop-in for Megatron's ``core_attention``. It takes (T, H, D) queries and (T, G, D) keys and values and reads
    boundaries and angles from the micro-batch's ``PackedLayout`` only.
    """

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
        """Returns (T, H * D)."""
        layout = packed_seq_params
        if layout is None or layout.cos is None or layout.sin is None:
            raise ValueError("PackedCoreAttention needs the micro-batch's PackedLayout as packed_seq_params")
        query = apply_rotary(query, layout.cos, layout.sin)
        key = apply_rotary(key, layout.cos, layout.sin)
        kernel = kernel_for(query.device.type)
        if layout.ring is not None:
            out = zigzag_ring_attention(query, key, value, layout.ring, self.scale, kernel, self.group)
        elif layout.gather is not None:
            out = allgather_attention(query, key, value, layout.gather, self.scale, kernel, self.group)
        elif layout.llama3 is not None:
            out = llama3_attention(query, key, value, layout.llama3, self.scale, self.group)
        else:
            out = _PackedAttention.apply(query, key, value, layout.segments, self.scale, kernel)
        return out.reshape(out.shape[0], -1)
