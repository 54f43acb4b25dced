"""Variable-length attention kernels behind one signature, each with its log-sum-exp: what a ring needs.

Shapes: q (Tq, H, D); k and v (Tk, G, D) with G dividing H (grouped-query attention); out like q; lse (H, Tq) float32.
``cu_seqlens_*`` are boundaries of the flat token axes; segment i of q attends to segment i of k. ``causal`` needs equal
lengths of both segments. Kernels are plain forward and backward functions; autograd is the caller's business.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Segments:
    """Boundaries of one flat token axis: on the host for loops, on the device for kernels."""

    host: tuple[int, ...]
    device: Tensor
    longest: int

    @classmethod
    def of(cls, cu_seqlens: Tensor) -> Segments:
        """From (S+1,) int32 boundaries."""
        host = tuple(cu_seqlens.tolist())
        longest = max((end - start for start, end in zip(host, host[1:], strict=False)), default=0)
        return cls(host, cu_seqlens, longest)

    def divided(self, parts: int) -> Segments:
        """Boundaries of the axis that keeps 1/parts of every segment; lengths must be divisible."""
        return Segments(tuple(value // parts for value in self.host), self.device // parts, self.longest // parts)

    @property
    def spans(self) -> list[tuple[int, int]]:
        """``[start, end)`` of every segment."""
        return list(zip(self.host, self.host[1:], strict=False))


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
    """torch's flash attention for CPU, segment by segment. Runs in float32, float64 and bfloat16."""

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, q_segments: Segments, k_segments: Segments, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        out = torch.zeros(q.shape, dtype=q.dtype)
        lse = torch.full((q.shape[1], q.shape[0]), float("-inf"), dtype=_statistics_dtype(q))
        k, v = _repeat_heads(k, q.shape[1]), _repeat_heads(v, q.shape[1])
        heads = [x.transpose(0, 1).unsqueeze(0) for x in (q, k, v)]
        op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        for (q0, q1), (k0, k1) in zip(q_segments.spans, k_segments.spans, strict=True):
            if q0 == q1 or k0 == k1:
                continue
            part, statistics = op(
                heads[0][:, :, q0:q1], heads[1][:, :, k0:k1], heads[2][:, :, k0:k1], 0.0, causal, scale=scale
            )
            out[q0:q1] = part[0].transpose(0, 1)
            lse[:, q0:q1] = statistics[0]
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
        groups = k.shape[1]
        k, v = _repeat_heads(k, q.shape[1]), _repeat_heads(v, q.shape[1])
        dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        g, qh, kh, vh, oh = (x.transpose(0, 1).unsqueeze(0) for x in (grad, q, k, v, out))
        op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        for (q0, q1), (k0, k1) in zip(q_segments.spans, k_segments.spans, strict=True):
            if q0 == q1 or k0 == k1:
                continue
            on_q, on_k = (..., slice(q0, q1), slice(None)), (..., slice(k0, k1), slice(None))
            statistics = lse[:, q0:q1].contiguous().unsqueeze(0)
            parts = op(g[on_q], qh[on_q], kh[on_k], vh[on_k], oh[on_q], statistics, 0.0, causal, scale=scale)
            dq[q0:q1] = parts[0][0].transpose(0, 1)
            dk[k0:k1] = parts[1][0].transpose(0, 1)
            dv[k0:k1] = parts[2][0].transpose(0, 1)
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


def _statistics_dtype(q: Tensor) -> torch.dtype:
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def _repeat_heads(x: Tensor, heads: int) -> Tensor:
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], dim=1)


def _sum_heads(x: Tensor, groups: int) -> Tensor:
    return x if x.shape[1] == groups else x.view(x.shape[0], groups, -1, x.shape[2]).sum(2)
