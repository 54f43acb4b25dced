"""Causal attention inside every sequence of a pack: the base of all ways to share it among context ranks, and the ring.

The zigzag ring over the context-parallel group is exact, on any kernel that returns its log-sum-exp. Every sequence is
cut into 2n equal chunks. Rank r holds chunks ``r`` and ``2n-1-r``, which balances the work. In n steps, keys and values
travel once around the ring, and partial results are merged by their log-sum-exp (https://arxiv.org/abs/2310.01889). On
rank r, all queries need the first half of the keys of a rank s < r. The second half of its queries needs all keys of a
rank s > r.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import torch
import torch.distributed as dist
from torch import Tensor

from backends.common.attention.kernels import Pairing, Saved, Segments, kernel_for, merge_attention
from slime_like.errors import TrainerError


class AttentionKind(NamedTuple):
    """A layer's kind of attention.

    Attributes:
        scale: factor of the products of queries and keys.
        window: most keys that a query sees, including its own; ``None``: all earlier keys.
    """

    scale: float
    window: int | None = None

    def within(self, longest: int) -> int | None:
        """Return the window if a sequence of ``longest`` tokens has more keys than it."""
        return self.window if self.window is not None and self.window < longest else None


class PackedAttention(ABC):
    """Boundaries of one micro-batch's sequences, and how ranks compute attention inside them."""

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None = None, sinks: Tensor | None = None
    ) -> Tensor:
        """Map the local tokens' (T, H, D) queries, (T, G, D) keys and values to (T, H, D) outputs; differentiable.

        Args:
            window: most keys that a query sees, including its own.
            sinks: (H,) scores that are part of a head's softmax without having a value (gpt-oss, arXiv:2508.10925).
        """
        return _Attend.apply(q, k, v, sinks, self, AttentionKind(scale, window))

    @abstractmethod
    def forward(self, q: Tensor, k: Tensor, v: Tensor, scores: AttentionKind) -> tuple[Tensor, ...]:
        """Return the output in the type of q, its log-sum-exp, and whatever else ``backward`` needs."""

    @abstractmethod
    def backward(
        self, grad: Tensor, saved: Saved, scores: AttentionKind, more: Sequence[Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of q, k and v. ``more`` holds the rest of what ``forward`` returned."""


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        attention: PackedAttention,
        scores: AttentionKind,
    ) -> Tensor:
        out, lse, *others = attention.forward(q, k, v, scores)
        if sinks is not None:
            total = torch.logaddexp(lse, sinks.to(lse.dtype)[:, None])
            out = (out * (lse - total).exp().t()[..., None]).to(q.dtype)
            lse = total
        ctx.save_for_backward(q, k, v, sinks, out, lse, *others)
        ctx.setting = (attention, scores)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        attention, scores = ctx.setting
        q, k, v, sinks, out, lse, *more = ctx.saved_tensors
        grad = grads[0].contiguous()
        # A kernel's probabilities are exp(score - lse), and its sums are of grad * out: a sink changes both correctly.
        gradients = attention.backward(grad, Saved(q, k, v, out, lse), scores, more)
        if sinks is None:
            return *gradients, None, None, None
        unseen = torch.linalg.vecdot(grad.to(lse.dtype), out.to(lse.dtype))
        shares = (sinks.to(lse.dtype)[:, None] - lse).exp()
        return *gradients, -(shares * unseen.t()).sum(dim=1).to(sinks.dtype), None, None


def unsupported_error(attention: str, what: str) -> TrainerError:
    """Return the error for layers that need the all-gather among context ranks."""
    return TrainerError(
        f"{attention} does not support {what} over several context ranks",
        code="attention-not-shared",
        remedy="set trainer.attention=allgather, or trainer.parallel.context=1",
    )


@dataclass(frozen=True, slots=True)
class LocalAttention(PackedAttention):
    """Attention of whole sequences on one rank."""

    segments: Segments

    def forward(self, q: Tensor, k: Tensor, v: Tensor, scores: AttentionKind) -> tuple[Tensor, ...]:
        return kernel_for(q.device.type).forward(q, k, v, self._pairing(scores))

    def backward(
        self, grad: Tensor, saved: Saved, scores: AttentionKind, more: Sequence[Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        return kernel_for(grad.device.type).backward(grad, saved, self._pairing(scores))

    def _pairing(self, scores: AttentionKind) -> Pairing:
        return Pairing(self.segments, self.segments, True, scores.scale, scores.within(self.segments.longest))


@dataclass(frozen=True, slots=True)
class RingSegments:
    """Positions of every sequence's local tokens, and of their two halves, on this rank's token axis.

    Attributes:
        whole: boundaries of each sequence's local chunks.
        half: boundaries after keeping one half of each sequence.
        front, back: (T / 2,) int64 rows of the first and the second halves.
    """

    whole: Segments
    half: Segments
    front: Tensor
    back: Tensor

    @classmethod
    def of(cls, cu_seqlens_padded: Tensor, ring_size: int) -> Self:
        """Create it from the whole pack's padded boundaries. Each length is a multiple of ``2 * ring_size``."""
        full = Segments.of(cu_seqlens_padded)
        whole, half = full.divided(ring_size), full.divided(2 * ring_size)
        rows = torch.arange(whole.host[-1], device=cu_seqlens_padded.device)
        lengths = (half.device[1:] - half.device[:-1]).to(torch.int64)
        starts = torch.repeat_interleave(half.device[:-1].to(torch.int64), lengths)
        front = rows[: half.host[-1]] + starts
        back = front + torch.repeat_interleave(lengths, lengths)
        return cls(whole, half, front, back)


class _Exchange:
    """One hop: sends tensors to the next rank while the previous rank's tensors arrive.

    Tensors have tags from ``first_tag`` up, so two concurrent exchanges cannot be confused. Backends without tags
    deliver in call order, which is the same on every rank.
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


_ALL = slice(None)


class RingStep(NamedTuple):
    """Computation of one ring step: query rows, key rows, and their pairing."""

    q_rows: slice | Tensor
    k_rows: slice | Tensor
    pairing: Pairing


def ring_step(step: int, rank: int, size: int, segments: RingSegments, scale: float) -> RingStep:
    """Return ``rank``'s computation in ``step`` of a ring of ``size``, with rank ``(rank - step) % size``'s keys."""
    whole, half = segments.whole, segments.half
    if step == 0:
        return RingStep(_ALL, _ALL, Pairing(whole, whole, True, scale))
    if (rank - step) % size < rank:
        return RingStep(_ALL, segments.front, Pairing(whole, half, False, scale))
    return RingStep(segments.back, _ALL, Pairing(half, whole, False, scale))


def _add(target: Tensor, rows: slice | Tensor, value: Tensor) -> None:
    if isinstance(rows, slice):
        target[rows].add_(value)
    else:
        target.index_add_(0, rows, value.to(target.dtype))


@dataclass(frozen=True, slots=True)
class RingAttention(PackedAttention):
    """Attention of zigzag chunks. The keys and values travel around the ``group``."""

    segments: RingSegments
    group: dist.ProcessGroup

    def _steps(self, scale: float) -> Iterator[tuple[RingStep, bool]]:
        """Yield every step, and whether another one follows."""
        size = self.group.size()
        for step in range(size):
            yield ring_step(step, self.group.rank(), size, self.segments, scale), step + 1 < size

    def forward(self, q: Tensor, k: Tensor, v: Tensor, scores: AttentionKind) -> tuple[Tensor, ...]:
        if scores.within(self.segments.whole.longest * self.group.size()) is not None:
            raise unsupported_error("attention ring", "sliding windows")
        kernel = kernel_for(q.device.type)
        out = lse = q  # until the first step, which covers all queries
        for plan, has_next in self._steps(scores.scale):
            exchange = _Exchange([k, v], self.group) if has_next else None
            rows, keys, pairing = plan
            part = kernel.forward(q[rows], k[keys], v[keys], pairing)
            if out is q:
                out, lse = part[0].to(part[1].dtype), part[1]
            else:
                out[rows], lse[:, rows] = merge_attention((out[rows], lse[:, rows]), part)
            if exchange is not None:
                k, v = exchange.wait()
        return out.to(q.dtype), lse

    def backward(
        self, grad: Tensor, saved: Saved, scores: AttentionKind, more: Sequence[Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v, out, lse = saved
        dq, dk, dv = (torch.zeros_like(x, dtype=lse.dtype) for x in (q, k, v))
        kernel, homeward = kernel_for(grad.device.type), None
        for plan, has_next in self._steps(scores.scale):
            onward = _Exchange([k, v], self.group) if has_next else None
            mine, theirs = plan.q_rows, plan.k_rows
            seen = Saved(q[mine], k[theirs], v[theirs], out[mine], lse[:, mine].contiguous())
            parts = kernel.backward(grad[mine], seen, plan.pairing)
            _add(dq, mine, parts[0])
            if homeward is not None:
                # These gradients belong to the current keys; they arrive one hop later.
                dk, dv = homeward.wait()
            _add(dk, theirs, parts[1])
            _add(dv, theirs, parts[2])
            homeward = _Exchange([dk, dv], self.group, first_tag=2)
            if onward is not None:
                k, v = onward.wait()
        assert homeward is not None
        dk, dv = homeward.wait()
        return dq.to(q.dtype), dk.to(saved.k.dtype), dv.to(saved.v.dtype)
