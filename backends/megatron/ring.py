"""Zigzag ring attention over the context-parallel group, exact, on any kernel that returns its log-sum-exp.

Every rank holds, of every sequence, the chunks ``r`` and ``2n-1-r`` of 2n equal ones: the same work on every rank. In n
steps keys and values travel once around the ring, and partial results are merged by their log-sum-exp
(https://arxiv.org/abs/2310.01889). Seen from rank r, keys of a rank s < r are needed in their first half by all of its
queries; keys of a rank s > r wholly, by the second half of its queries.
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
class RingSegments:
    """Positions of every sequence's local tokens, and their two halves, on this rank's token axis.

    Attributes:
        whole: boundaries of the local chunks of every sequence.
        half: boundaries after keeping one half of each.
        front, back: (T / 2,) int64 rows of the first and the second halves.
    """

    whole: Segments
    half: Segments
    front: Tensor
    back: Tensor

    @classmethod
    def of(cls, cu_seqlens_padded: Tensor, ring_size: int) -> RingSegments:
        """From the padded boundaries of the whole pack, each length a multiple of ``2 * ring_size``."""
        full = Segments.of(cu_seqlens_padded)
        whole, half = full.divided(ring_size), full.divided(2 * ring_size)
        rows = torch.arange(whole.host[-1], device=cu_seqlens_padded.device)
        lengths = (half.device[1:] - half.device[:-1]).to(torch.int64)
        starts = torch.repeat_interleave(half.device[:-1].to(torch.int64), lengths)
        front = rows[: half.host[-1]] + starts
        back = front + torch.repeat_interleave(lengths, lengths)
        return cls(whole, half, front, back)


class _Exchange:
    """One hop: sends tensors to the next rank while those of the previous rank arrive.

    Every tensor has a tag from ``first_tag`` on, so that two exchanges under way at once cannot be confused (backends
    without tags deliver in the order of the calls, which is the same on every rank).
    """

    def __init__(self, tensors: list[Tensor], group: dist.ProcessGroup, first_tag: int = 0) -> None:
        ranks = dist.get_process_group_ranks(group)
        following, previous = ranks[(group.rank() + 1) % len(ranks)], ranks[group.rank() - 1]
        self._sent = [tensor.contiguous() for tensor in tensors]
        self._received = [torch.empty_like(tensor) for tensor in self._sent]
        operations: list[dist.P2POp] = []
        for tag, (sent, received) in enumerate(zip(self._sent, self._received, strict=True), first_tag):
            operations.append(dist.P2POp(dist.isend, sent, following, group, tag))
            operations.append(dist.P2POp(dist.irecv, received, previous, group, tag))
        self._works = dist.batch_isend_irecv(operations)

    def wait(self) -> list[Tensor]:
        for work in self._works:
            work.wait()
        return self._received


@dataclass(frozen=True, slots=True)
class RingStep:
    """Computation of one ring step: which query rows, which key rows (None: all), causally or not."""

    q_rows: Tensor | None
    k_rows: Tensor | None
    q_segments: Segments
    k_segments: Segments
    causal: bool


def ring_step(step: int, rank: int, size: int, segments: RingSegments) -> RingStep:
    """Computation of ``rank`` in ``step`` of a ring of ``size``, with the keys of rank ``(rank - step) % size``."""
    if step == 0:
        return RingStep(None, None, segments.whole, segments.whole, True)
    if (rank - step) % size < rank:
        return RingStep(None, segments.front, segments.whole, segments.half, False)
    return RingStep(segments.back, None, segments.half, segments.whole, False)


def _take(x: Tensor, rows: Tensor | None) -> Tensor:
    return x if rows is None else x.index_select(0, rows)


def _add(target: Tensor, rows: Tensor | None, value: Tensor) -> None:
    if rows is None:
        target.add_(value)
    else:
        target.index_add_(0, rows, value.to(target.dtype))


class _ZigzagRing(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        segments: RingSegments,
        scale: float,
        kernel: AttentionKernel,
        group: dist.ProcessGroup,
    ) -> Tensor:
        accumulated: tuple[Tensor, Tensor] | None = None
        keys, values = k, v
        for step in range(group.size()):
            exchange = _Exchange([keys, values], group) if step + 1 < group.size() else None
            plan = ring_step(step, group.rank(), group.size(), segments)
            part = kernel.forward(
                _take(q, plan.q_rows),
                _take(keys, plan.k_rows),
                _take(values, plan.k_rows),
                plan.q_segments,
                plan.k_segments,
                plan.causal,
                scale,
            )
            accumulated = merged_attention(accumulated, part, plan.q_rows)
            if exchange is not None:
                keys, values = exchange.wait()
        assert accumulated is not None
        out, lse = accumulated[0].to(q.dtype), accumulated[1]
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.setting = (segments, scale, kernel, group)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        segments, scale, kernel, group = ctx.setting
        grad = grads[0].contiguous()
        dq, dk, dv = (torch.zeros_like(x, dtype=lse.dtype) for x in (q, k, v))
        keys, values = k, v
        homeward: _Exchange | None = None
        for step in range(group.size()):
            onward = _Exchange([keys, values], group) if step + 1 < group.size() else None
            plan = ring_step(step, group.rank(), group.size(), segments)
            parts = kernel.backward(
                _take(grad, plan.q_rows),
                _take(q, plan.q_rows),
                _take(keys, plan.k_rows),
                _take(values, plan.k_rows),
                _take(out, plan.q_rows),
                lse if plan.q_rows is None else lse.index_select(1, plan.q_rows),
                plan.q_segments,
                plan.k_segments,
                plan.causal,
                scale,
            )
            _add(dq, plan.q_rows, parts[0])
            if homeward is not None:
                # These gradients belong to the keys in hand; they arrive one hop after them.
                dk, dv = homeward.wait()
            _add(dk, plan.k_rows, parts[1])
            _add(dv, plan.k_rows, parts[2])
            homeward = _Exchange([dk, dv], group, first_tag=2)
            if onward is not None:
                keys, values = onward.wait()
        assert homeward is not None
        dk, dv = homeward.wait()
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None, None, None, None


def zigzag_ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    segments: RingSegments,
    scale: float,
    kernel: AttentionKernel,
    group: dist.ProcessGroup,
) -> Tensor:
    """Causal attention of every sequence over the whole context group: local (T, H, D) in, local (T, H, D) out."""
    return _ZigzagRing.apply(q, k, v, segments, scale, kernel, group)
