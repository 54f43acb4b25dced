"""Variable-length attention kernels behind one signature, each with its log-sum-exp: what a ring needs.

Shapes: q (Tq, H, D); k and v (Tk, G, D) with G dividing H (grouped-query attention); out like q; lse (H, Tq) float32.
``cu_seqlens_*`` are boundaries of the flat token axes; segment i of q attends to segment i of k. ``causal`` needs equal
lengths of both segments. Kernels are plain forward and backward functions; autograd is the caller's business.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import torch
from torch import Tensor

from backends.megatron.cpu_runtime import without_redirection


@dataclass(frozen=True, slots=True)
class Segments:
    """Boundaries of one flat token axis: on the host for loops, on the device for kernels."""

    host: tuple[int, ...]
    device: Tensor
    longest: int

    @classmethod
    def of(cls, cu_seqlens: Tensor) -> Segments:
        """From (S+1,) int32 boundaries; empty segments are left out, kernels need not know them."""
        cu_seqlens = torch.unique_consecutive(cu_seqlens)
        host = tuple(cu_seqlens.tolist())
        longest = max((end - start for start, end in pairwise(host)), default=0)
        return cls(host, cu_seqlens, longest)

    def divided(self, parts: int) -> Segments:
        """Boundaries of the axis that keeps 1/parts of every segment; lengths must be divisible."""
        return Segments(tuple(value // parts for value in self.host), self.device // parts, self.longest // parts)

    @property
    def lengths(self) -> list[int]:
        """Tokens of every segment."""
        return [end - start for start, end in pairwise(self.host)]


class AttentionKernel(Protocol):
    """One implementation of packed attention."""

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, q_segments: Segments, k_segments: Segments, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Returns (out, lse)."""

    def backward(
        self,
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        q_segments: Segments,
        k_segments: Segments,
        causal: bool,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of q, k, v. ``out`` and ``lse`` may cover more keys than k holds, as in a ring."""


class CpuFlash:
    """torch's flash attention for CPU, segment by segment. Runs in float32, float64 and bfloat16.

    Segments are views of one split and results are joined at once: at tens of tokens per sequence, what happens between
    the operator's calls weighs as much as the calls.
    """

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, q_segments: Segments, k_segments: Segments, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        with without_redirection():
            op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
            k, v = _repeat_heads(k, q.shape[1]), _repeat_heads(v, q.shape[1])
            queries = _by_segment(q, q_segments)
            keys, values = _by_segment(k, k_segments), _by_segment(v, k_segments)
            parts = [op(*qkv, 0.0, causal, scale=scale) for qkv in zip(queries, keys, values, strict=True)]
            out = torch.cat([part[0].squeeze(0).transpose(0, 1) for part in parts])
            return out, torch.cat([part[1].squeeze(0) for part in parts], dim=1)

    def backward(
        self,
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        q_segments: Segments,
        k_segments: Segments,
        causal: bool,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        with without_redirection():
            op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
            groups = k.shape[1]
            k, v = _repeat_heads(k, q.shape[1]), _repeat_heads(v, q.shape[1])
            grads, queries, outs = (_by_segment(x, q_segments) for x in (grad, q, out))
            keys, values = _by_segment(k, k_segments), _by_segment(v, k_segments)
            statistics = [x.contiguous().unsqueeze(0) for x in lse.split(q_segments.lengths, dim=1)]
            parts = [
                op(*tensors, 0.0, causal, scale=scale)
                for tensors in zip(grads, queries, keys, values, outs, statistics, strict=True)
            ]
            dq, dk, dv = (torch.cat([part[i].squeeze(0).transpose(0, 1) for part in parts]) for i in range(3))
            return dq, _sum_heads(dk, groups), _sum_heads(dv, groups)


class CudaFlash:
    """torch's own flash attention for CUDA (bfloat16 and float16); grouped heads are read in place."""

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, q_segments: Segments, k_segments: Segments, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        out, lse, *_ = torch.ops.aten._flash_attention_forward(
            q,
            k,
            v,
            q_segments.device,
            k_segments.device,
            q_segments.longest,
            k_segments.longest,
            0.0,
            causal,
            False,
            scale=scale,
        )
        return out, lse

    def backward(
        self,
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        q_segments: Segments,
        k_segments: Segments,
        causal: bool,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        # Without dropout the random state is never read; the operator still wants its two tensors.
        unused = torch.zeros(2, dtype=torch.uint64, device=q.device)
        dq, dk, dv = torch.ops.aten._flash_attention_backward(
            grad,
            q,
            k,
            v,
            out,
            lse,
            q_segments.device,
            k_segments.device,
            q_segments.longest,
            k_segments.longest,
            0.0,
            causal,
            unused,
            unused[:0],
            scale=scale,
        )
        return dq, dk, dv


def kernel_for(device: torch.device) -> AttentionKernel:
    """The flash kernel that torch itself brings for this kind of device."""
    return CudaFlash() if device.type == "cuda" else CpuFlash()


def _by_segment(x: Tensor, segments: Segments) -> tuple[Tensor, ...]:
    """(T, heads, D) to views (1, heads, length, D)."""
    return x.transpose(0, 1).unsqueeze(0).split(segments.lengths, dim=2)


def _repeat_heads(x: Tensor, heads: int) -> Tensor:
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], dim=1)


def _sum_heads(x: Tensor, groups: int) -> Tensor:
    return x if x.shape[1] == groups else x.view(x.shape[0], groups, -1, x.shape[2]).sum(2)
