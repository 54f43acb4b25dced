"""Attention over sequences that may share prefixes, or continue from another rank's part of the pack.

Attention is causal within a segment, and full over its prefixes, each computed once. All descendants of a segment
directly follow it on the token axis. So one call per level of the tree lets every query see its prefix segment of that
level. Results are merged by their log-sum-exp, as in a ring (https://arxiv.org/abs/2310.01889), and gradients of keys
and values add up.

With context ranks, every rank holds one contiguous part of the axis and gathers all keys and values, as in Llama 3
(https://arxiv.org/abs/2407.21783, section 3.3.2). The earlier part of a segment that continues from other ranks is one
more level. Communication of keys, values and their gradients overlaps with a rank's local computation.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple, Self

import torch
import torch.distributed as dist
from torch import Tensor

from backends.common.attention.kernels import Pairing, Saved, Segments, kernel_for, merge_attention
from backends.common.attention.packed_attention import AttentionKind, PackedAttention
from slime_like.errors import TrainerError

Rows = slice | Tensor


class _OnItsWay(NamedTuple):
    """Result of a running collective. Its input must stay alive until the collective ends."""

    work: dist.Work
    result: Tensor
    source: Tensor

    def wait(self) -> Tensor:
        self.work.wait()
        return self.result


def _gather(x: Tensor, group: dist.ProcessGroup) -> _OnItsWay:
    """Start gathering every rank's part of ``x``."""
    x, whole = x.contiguous(), x.new_empty(x.shape[0] * group.size(), *x.shape[1:])
    return _OnItsWay(dist.all_gather_into_tensor(whole, x, group=group, async_op=True), whole, x)


def _sum_parts(x: Tensor, group: dist.ProcessGroup) -> _OnItsWay:
    """Start summing the gradient ``x`` of a gathered tensor over ranks; returns this rank's part."""
    part = x.new_empty(x.shape[0] // group.size(), *x.shape[1:])
    return _OnItsWay(dist.reduce_scatter_tensor(part, x, group=group, async_op=True), part, x)


class _Seen(NamedTuple):
    """Queries and the keys that all of them see, as tokens of the whole axis."""

    queries: range
    keys: range


@dataclass(frozen=True, slots=True)
class Level:
    """One call without a mask: ``rows`` of this rank's queries, and ``keys`` of the tokens that its levels read."""

    rows: Rows
    keys: Rows
    q: Segments
    k: Segments

    def pairing(self, scale: float) -> Pairing:
        return Pairing(self.q, self.k, False, scale)


@dataclass(frozen=True, slots=True)
class PrefixAttention(PackedAttention):
    """Attention of this rank's part of a pack.

    Attributes:
        local: boundaries of the segments, or pieces of them, on this rank.
        levels: what queries see in other segments.
        far: tokens of the whole axis that the levels read.
        group: ranks that hold the other parts; ``None`` if there is only one part.
        longest: tokens of the longest sequence.
        shares: some segments continue others.
    """

    local: Segments
    levels: tuple[Level, ...]
    far: Rows
    group: dist.ProcessGroup | None
    longest: int
    shares: bool

    @classmethod
    def of(cls, boundaries: Tensor, parents: Tensor | None, part: range, group: dist.ProcessGroup) -> Self:
        """Create it from all segments' boundaries and parents, and the ``part`` of the axis on this rank."""
        segments = [range(*ends) for ends in pairwise(boundaries.tolist())]
        # The segment that the part begins inside has earlier tokens.
        inside = [one for one in segments if one.start < part.start < one.stop]
        earlier = [_Seen(range(part.start, one.stop), range(one.start, part.start)) for one in inside]
        levels = [earlier, *([] if parents is None else _levels(segments, parents.tolist()))]
        mine = [
            [_Seen(both, keys) for queries, keys in level if (both := _intersect(queries, part))] for level in levels
        ]
        alone = group.size() == 1
        needed = [part] if alone else _unite([keys for level in mine for _, keys in level])
        device = boundaries.device
        return cls(
            Segments.of((boundaries - part.start).clamp(0, len(part))),
            tuple(_level(level, part, needed, device) for level in mine if level),
            rows_of(needed, device),
            None if alone else group,
            _longest(segments, None if parents is None else parents.tolist()),
            parents is not None,
        )

    def forward(self, q: Tensor, k: Tensor, v: Tensor, scores: AttentionKind) -> tuple[Tensor, ...]:
        kernel, windowed = kernel_for(q.device.type), self._windowed(scores)
        # Every rank joins the gathers, even if its queries don't use them.
        gathering = [] if self.group is None else [_gather(x, self.group) for x in (k, v)]
        if windowed is not None:
            pairing, rows = windowed
            near = [_copy_rows(whole.wait(), rows) for whole in gathering]
            keys, values = (torch.cat(parts) for parts in zip(near, (k, v), strict=True)) if near else (k, v)
            return *kernel.forward(q, keys, values, pairing), *near
        out, lse = kernel.forward(q, k, v, Pairing(self.local, self.local, True, scores.scale))
        out = out.to(lse.dtype)
        far = [_copy_rows(whole.wait(), self.far) for whole in gathering]
        keys, values = far or (k, v)
        for level in self.levels:
            rows = level.rows
            part = kernel.forward(q[rows], keys[level.keys], values[level.keys], level.pairing(scores.scale))
            out[rows], lse[:, rows] = merge_attention((out[rows], lse[:, rows]), part)
        return out.to(q.dtype), lse, *far

    def backward(
        self, grad: Tensor, saved: Saved, scores: AttentionKind, more: Sequence[Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        kernel, (q, k, v, out, lse) = kernel_for(grad.device.type), saved
        if (windowed := self._windowed(scores)) is not None:
            return self._windowed_backward(grad, saved, *windowed, more)
        keys, values = more or (k, v)
        dq, dk, dv = (torch.zeros_like(x, dtype=lse.dtype) for x in (q, keys, values))
        for level in self.levels:
            rows, seen = level.rows, level.keys
            seeing = Saved(q[rows], keys[seen], values[seen], out[rows], lse[:, rows].contiguous())
            parts = kernel.backward(grad[rows], seeing, level.pairing(scores.scale))
            for whole, place, value in zip((dq, dk, dv), (rows, seen, seen), parts, strict=True):
                whole[place] += value
        homecoming = (
            None if self.group is None else [_sum_parts(self._spread(x, self.far, k), self.group) for x in (dk, dv)]
        )
        local = kernel.backward(grad, saved, Pairing(self.local, self.local, True, scores.scale))
        far = (dq, dk, dv) if homecoming is None else (dq, *(gradient.wait() for gradient in homecoming))
        of_q, of_k, of_v = (x.add_(part).to(part.dtype) for x, part in zip(far, local, strict=True))
        return of_q, of_k, of_v

    def _windowed(self, scores: AttentionKind) -> tuple[Pairing, Rows] | None:
        """Return the only call if a window is narrower than a sequence, and the tokens of other ranks that it reads.

        The first local segment sees these tokens, then itself.
        """
        if (window := scores.within(self.longest)) is None:
            return None
        if self.shares:
            raise TrainerError(
                "sliding windows do not support sequences that share prefixes",
                code="prefixes-not-supported",
                remedy="set trainer.share_prefixes=false",
            )
        assert isinstance(self.far, slice)  # they belong to one segment, if none share prefixes
        rows = self.far if self.group is None else slice(max(self.far.start, self.far.stop - window + 1), self.far.stop)
        near = 0 if self.group is None else rows.stop - rows.start
        moved = tuple(end + near for end in self.local.host[1:])
        bounds = torch.cat([self.local.device[:1], self.local.device[1:] + near])
        longest = max(end - start for start, end in pairwise((0, *moved)))
        return Pairing(self.local, Segments((0, *moved), bounds, longest), True, scores.scale, window), rows

    def _windowed_backward(
        self, grad: Tensor, saved: Saved, pairing: Pairing, rows: Rows, near: Sequence[Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        given = zip(near, (saved.k, saved.v), strict=True)
        keys, values = (torch.cat(parts) for parts in given) if near else saved[1:3]
        dq, *gradients = kernel_for(grad.device.type).backward(grad, saved._replace(k=keys, v=values), pairing)
        if self.group is None:
            return dq, gradients[0], gradients[1]
        wide, size = saved.lse.dtype, len(keys) - len(saved.k)
        sent = [_sum_parts(self._spread(x[:size].to(wide), rows, saved.k), self.group) for x in gradients]
        dk, dv = (home.wait().add_(x[size:]).to(x.dtype) for home, x in zip(sent, gradients, strict=True))
        return dq, dk, dv

    def _spread(self, gradient: Tensor, rows: Rows, local: Tensor) -> Tensor:
        """Place the gradient of ``rows`` among zeros for the axis. Every rank's part has the size of ``local``."""
        assert self.group is not None
        whole = gradient.new_zeros(local.shape[0] * self.group.size(), *gradient.shape[1:])
        whole[rows] = gradient
        return whole


def _longest(segments: Sequence[range], parents: Sequence[int] | None) -> int:
    """Return the tokens of the longest sequence: a segment with all that it continues."""
    lengths = [len(one) for one in segments]
    for index, parent in enumerate(parents or ()):
        lengths[index] += lengths[parent] if parent >= 0 else 0
    return max(lengths)


def _levels(segments: Sequence[range], parents: Sequence[int]) -> list[list[_Seen]]:
    """List, by depth, the segments that others continue, each with all tokens that continue it."""
    depths, stops = list[int](), [one.stop for one in segments]
    for parent in parents:
        depths.append(0 if parent < 0 else depths[parent] + 1)
    for index in reversed(range(len(segments))):
        if parents[index] >= 0:
            stops[parents[index]] = max(stops[parents[index]], stops[index])
    levels: list[list[_Seen]] = [[] for _ in range(max(depths))]
    for one, depth, stop in zip(segments, depths, stops, strict=True):
        if stop > one.stop:
            levels[depth].append(_Seen(range(one.stop, stop), one))
    return levels


def _level(level: Sequence[_Seen], part: range, needed: Sequence[range], device: torch.device) -> Level:
    """Map the level to this rank's queries and to the concatenated ``needed`` tokens."""
    begins = list(accumulate(map(len, needed), initial=0))
    queries, keys = [_shift(queries, -part.start) for queries, _ in level], []
    for _, span in level:
        at, begin = next((one, begin) for one, begin in zip(needed, begins, strict=False) if span.start in one)
        keys.append(_shift(span, begin - at.start))
    places = rows_of(queries, device), rows_of(keys, device)
    return Level(*places, segments_of(queries, device), segments_of(keys, device))


def _copy_rows(x: Tensor, rows: Rows) -> Tensor:
    """Copy only ``rows`` of x: a view would keep all of it alive."""
    return x[rows].clone() if isinstance(rows, slice) else x[rows]


def _intersect(one: range, other: range) -> range:
    return range(max(one.start, other.start), min(one.stop, other.stop))


def _shift(span: range, by: int) -> range:
    return range(span.start + by, span.stop + by)


def _unite(spans: Sequence[range]) -> list[range]:
    """Return the union of the spans, in order."""
    joined: list[range] = []
    for span in sorted(spans, key=lambda each: each.start):
        if joined and span.start <= joined[-1].stop:
            joined[-1] = range(joined[-1].start, max(joined[-1].stop, span.stop))
        else:
            joined.append(span)
    return joined


def rows_of(spans: Sequence[range], device: torch.device) -> Rows:
    """Return a slice if the spans are adjacent, because it needs no copy, else an index."""
    if not spans:
        return slice(0, 0)
    if all(one.stop == following.start for one, following in pairwise(spans)):
        return slice(spans[0].start, spans[-1].stop)
    return torch.cat([torch.arange(span.start, span.stop, device=device) for span in spans])


def segments_of(spans: Sequence[range], device: torch.device) -> Segments:
    """Return the boundaries of the spans, one after the other."""
    ends = accumulate(map(len, spans), initial=0)
    return Segments.of(torch.tensor(list(ends), dtype=torch.int32, device=device))
