"""All-gather context parallelism, as in Llama 3 (https://arxiv.org/abs/2407.21783, section 3.3.2).

Every rank holds one contiguous part of the pack, and gathers all keys and values. A sequence inside one part needs only
that part. Only a sequence that continues from earlier ranks uses gathered keys: those between its start and the part's
start, without a mask. The two results are merged by their log-sum-exp. Communication of keys, values and their
gradients overlaps with a rank's local computation.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

import torch
import torch.distributed as dist
from torch import Tensor

from backends.common.attention.kernels import Pairing, Saved, Segments, kernel_for, merged_attention
from backends.common.attention.packed_attention import PackedAttention


class _OnItsWay(NamedTuple):
    """Result of a running collective. Its input must stay alive until the collective ends."""

    work: dist.Work
    result: Tensor
    source: Tensor

    def wait(self) -> Tensor:
        self.work.wait()
        return self.result


def gather(x: Tensor, group: dist.ProcessGroup) -> _OnItsWay:
    """Start gathering every rank's part of ``x``."""
    x, whole = x.contiguous(), x.new_empty(x.shape[0] * group.size(), *x.shape[1:])
    return _OnItsWay(dist.all_gather_into_tensor(whole, x, group=group, async_op=True), whole, x)


def sum_parts(x: Tensor, group: dist.ProcessGroup) -> _OnItsWay:
    """Start summing the gradient ``x`` of a gathered tensor over ranks; returns this rank's part."""
    part = x.new_empty(x.shape[0] // group.size(), *x.shape[1:])
    return _OnItsWay(dist.reduce_scatter_tensor(part, x, group=group, async_op=True), part, x)


@dataclass(frozen=True, slots=True)
class AllGatherAttention(PackedAttention):
    """Attention of a contiguous part of the pack.

    Attributes:
        local: boundaries of the sequences, or pieces of them, inside the part.
        prefix: earlier tokens, on the whole axis, of the sequence that continues into the part; ends at its start.
        reaching_in: boundaries of that sequence's first piece, and of its earlier tokens; None if there is none.
        group: ranks that hold the other parts.
    """

    local: Segments
    prefix: slice
    reaching_in: tuple[Segments, Segments] | None
    group: dist.ProcessGroup

    @classmethod
    def of(cls, cu_seqlens_padded: Tensor, cu_seqlens_local: Tensor, begin: int, group: dist.ProcessGroup) -> Self:
        """Create it from the boundaries of the whole pack, the boundaries clipped to the part, and the part's start."""
        local = Segments.of(cu_seqlens_local)
        start = max(boundary for boundary in cu_seqlens_padded.tolist() if boundary <= begin)
        reaching_in = None
        if start < begin:
            first, earlier = (cu_seqlens_local.new_tensor([0, end]) for end in (local.host[1], begin - start))
            reaching_in = Segments.of(first), Segments.of(earlier)
        return cls(local, slice(start, begin), reaching_in, group)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, ...]:
        kernel = kernel_for(q.device.type)
        # Every rank joins the gathers, even the first, whose queries don't use them.
        gathering = [gather(x, self.group) for x in (k, v)]
        out, lse = kernel.forward(q, k, v, Pairing(self.local, self.local, True, scale))
        keys, values = (whole.wait()[self.prefix] for whole in gathering)
        if self.reaching_in is not None:
            reaching = Pairing(*self.reaching_in, False, scale)
            rows = torch.arange(reaching.q.host[-1], device=q.device)
            part = kernel.forward(q[: len(rows)], keys, values, reaching)
            out, lse = merged_attention((out.to(lse.dtype), lse), part, rows)
        return out.to(q.dtype), lse, keys.clone(), values.clone()

    def backward(
        self, grad: Tensor, saved: Saved, scale: float, more: Sequence[Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        kernel, (q, k, v, out, lse) = kernel_for(grad.device.type), saved
        far = [x.new_zeros(x.shape[0] * self.group.size(), *x.shape[1:], dtype=lse.dtype) for x in (k, v)]
        n = 0
        if self.reaching_in is not None:
            reaching = Pairing(*self.reaching_in, False, scale)
            n = reaching.q.host[-1]
            far_q, *parts = kernel.backward(
                grad[:n], Saved(q[:n], more[0], more[1], out[:n], lse[:, :n].contiguous()), reaching
            )
            for target, value in zip(far, parts, strict=True):
                target[self.prefix] = value
        homecoming = [sum_parts(x, self.group) for x in far]
        dq, dk, dv = kernel.backward(grad, saved, Pairing(self.local, self.local, True, scale))
        if n:
            dq = torch.cat([(dq[:n].to(lse.dtype) + far_q).to(dq.dtype), dq[n:]])
        dk, dv = (local + gradient.wait() for local, gradient in zip((dk, dv), homecoming, strict=True))
        return dq, dk.to(k.dtype), dv.to(v.dtype)
