"""All-gather context parallelism, as Llama 3 trained (https://arxiv.org/abs/2407.21783, section 3.3.2).

Every rank holds one contiguous part of the pack, and keys and values are gathered whole. A sequence that lies inside
one part needs nothing but that part; only the sequence that reaches in from earlier ranks sees gathered keys: those
between its start and the part's start, without a mask. Both pieces are merged by their log-sum-exp. Keys and values
travel while a rank computes with its part, and so do their gradients.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from backends.common.attention.kernels import AttentionKernel, Segments
from backends.common.attention.partial_results import merged_attention


@dataclass(frozen=True, slots=True)
class GatherSegments:
    """Boundaries on one rank's contiguous part of a pack.

    Attributes:
        local: boundaries of the sequences, or pieces of them, inside the part.
        reaching_in: boundaries of the first piece alone, if it continues a sequence of earlier ranks.
        prefix: ``[start, end)`` of that sequence's earlier tokens on the whole axis; ``end`` is where the part begins.
        prefix_segments: boundaries of those tokens alone.
    """

    local: Segments
    reaching_in: Segments | None
    prefix: tuple[int, int]
    prefix_segments: Segments | None

    @classmethod
    def of(cls, cu_seqlens_padded: Tensor, cu_seqlens_local: Tensor, begin: int) -> GatherSegments:
        """From the boundaries of the whole pack, those clipped to the part, and the part's first position."""
        local = Segments.of(cu_seqlens_local)
        start = max(boundary for boundary in cu_seqlens_padded.tolist() if boundary <= begin)
        if start == begin:
            return cls(local, None, (begin, begin), None)
        first = cu_seqlens_local.new_tensor([0, local.host[1]])
        earlier = cu_seqlens_local.new_tensor([0, begin - start])
        return cls(local, Segments.of(first), (start, begin), Segments.of(earlier))


class _Gathering:
    """Every rank's part of ``x``, on its way."""

    def __init__(self, x: Tensor, group: dist.ProcessGroup) -> None:
        self._own = x.contiguous()
        self._whole = x.new_empty(x.shape[0] * group.size(), *x.shape[1:])
        self._work = dist.all_gather_into_tensor(self._whole, self._own, group=group, async_op=True)

    def wait(self) -> Tensor:
        self._work.wait()
        return self._whole


class _Homecoming:
    """Sum over ranks of the gradient ``x`` of a gathered tensor, this rank's part of it, on its way."""

    def __init__(self, x: Tensor, group: dist.ProcessGroup) -> None:
        self._whole = x
        self._own = x.new_empty(x.shape[0] // group.size(), *x.shape[1:])
        self._work = dist.reduce_scatter_tensor(self._own, x, group=group, async_op=True)

    def wait(self) -> Tensor:
        self._work.wait()
        return self._own


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        segments: GatherSegments,
        scale: float,
        kernel: AttentionKernel,
        group: dist.ProcessGroup,
    ) -> Tensor:
        # Every rank joins the gathers, also the first, whose queries need nothing of them.
        prefix, gathering = slice(*segments.prefix), [_Gathering(x, group) for x in (k, v)]
        out, lse = kernel.forward(q, k, v, segments.local, segments.local, True, scale)
        keys, values = (whole.wait()[prefix] for whole in gathering)
        if segments.reaching_in is not None and segments.prefix_segments is not None:
            rows = torch.arange(segments.reaching_in.host[-1], device=q.device)
            part = kernel.forward(
                q[: len(rows)], keys, values, segments.reaching_in, segments.prefix_segments, False, scale
            )
            out, lse = merged_attention((out.to(lse.dtype), lse), part, rows)
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, keys.clone(), values.clone(), out, lse)
        ctx.setting = (segments, scale, kernel, group)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, keys, values, out, lse = ctx.saved_tensors
        segments, scale, kernel, group = ctx.setting
        grad = grads[0].contiguous()
        far = [x.new_zeros(x.shape[0] * group.size(), *x.shape[1:], dtype=lse.dtype) for x in (k, v)]
        n = 0 if segments.reaching_in is None else segments.reaching_in.host[-1]
        if n:
            parts = kernel.backward(
                grad[:n],
                q[:n],
                keys,
                values,
                out[:n],
                lse[:, :n].contiguous(),
                segments.reaching_in,
                segments.prefix_segments,
                False,
                scale,
            )
            for target, value in zip(far, parts[1:], strict=True):
                target[slice(*segments.prefix)] = value
        homecoming = [_Homecoming(x, group) for x in far]
        dq, dk, dv = kernel.backward(grad, q, k, v, out, lse, segments.local, segments.local, True, scale)
        if n:
            dq = torch.cat([(dq[:n].to(lse.dtype) + parts[0]).to(dq.dtype), dq[n:]])
        near = [local + gradient.wait() for local, gradient in zip((dk, dv), homecoming, strict=True)]
        return dq, near[0].to(k.dtype), near[1].to(v.dtype), None, None, None, None


def allgather_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    segments: GatherSegments,
    scale: float,
    kernel: AttentionKernel,
    group: dist.ProcessGroup,
) -> Tensor:
    """Causal attention of every sequence over the whole context group: local (T, H, D) in, local (T, H, D) out."""
    return _AllGather.apply(q, k, v, segments, scale, kernel, group)
