"""Packed attention written out, and the ring's steps of all ranks one after another, without messages."""

from itertools import pairwise

import torch
from torch import Tensor

from backends.common.attention.kernels import AttentionKernel, Saved, Segments, merge_attention
from backends.common.attention.packed_attention import RingSegments, ring_step


def segments_of(lengths: list[int], device: str = "cpu") -> Segments:
    """Return the segments of sequences of these lengths."""
    return Segments.of(boundaries(lengths).to(device))


def boundaries(lengths: list[int]) -> Tensor:
    """Return (S+1,) int32 boundaries."""
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32)


def dense_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_lens: list[int],
    k_lens: list[int],
    causal: bool,
    scale: float,
    sinks: Tensor | None = None,
    window: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Return (Tq, H, D) outputs and (H, Tq) log-sum-exps. Under the mask, the last query sees the last key.

    A query sees at most ``window`` keys, and the (H,) ``sinks`` are scores of one more key without a value.
    """
    outs, sums = [], []
    repeats = q.shape[1] // k.shape[1]
    for qs, ks, vs in zip(q.split(q_lens), k.split(k_lens), v.split(k_lens), strict=True):
        ks, vs = (x.repeat_interleave(repeats, dim=1) for x in (ks, vs))
        scores = torch.einsum("qhd,khd->hqk", qs, ks) * scale
        if causal:
            hidden = torch.ones(scores.shape[1:], device=q.device).triu(1 + len(ks) - len(qs)).bool()
            if window is not None:
                hidden = hidden | torch.ones_like(hidden).tril(len(ks) - len(qs) - window)
            scores = scores.masked_fill(hidden, float("-inf"))
        if sinks is not None:
            scores = torch.cat([scores, sinks[:, None, None].expand(-1, len(qs), 1)], dim=-1)
        outs.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1)[..., : len(ks)], vs))
        sums.append(scores.logsumexp(-1))
    return torch.cat(outs), torch.cat(sums, dim=1)


def relative_error(found: Tensor, expected: Tensor) -> float:
    """Return the error relative to ``expected``, by norm."""
    return float((found.double() - expected.double()).norm() / expected.double().norm())


def dense_results(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    grad: Tensor,
    lengths: list[int],
    scale: float,
    k_lengths: list[int] | None = None,
    causal: bool = True,
    sinks: Tensor | None = None,
    window: int | None = None,
) -> list[Tensor]:
    """Compute output, log-sum-exp, and gradients of q, k, v and any sinks for ``grad``, in float64."""
    given = (q, k, v) if sinks is None else (q, k, v, sinks)
    leaves = [x.double().clone().requires_grad_() for x in given]  # a copy, even if they are float64 already
    out, lse = dense_attention(*leaves[:3], lengths, k_lengths or lengths, causal, scale, *leaves[3:], window=window)
    return [x.detach() for x in (out, lse, *torch.autograd.grad(out, leaves, grad.double()))]


def assert_near(found: list[Tensor], expected: list[Tensor], bound: float) -> None:
    """Compare tensor by tensor, relative by norm."""
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.shape == theirs.shape
        assert relative_error(ours, theirs) < bound


def zigzag_rows(lengths: list[int], size: int, rank: int) -> Tensor:
    """Return the rows of the pack on ``rank``: chunks ``rank`` and ``2 * size - 1 - rank`` of every sequence."""
    rows = []
    for start, end in pairwise(boundaries(lengths).tolist()):
        chunks = torch.arange(start, end).chunk(2 * size)
        rows += [chunks[rank], chunks[2 * size - 1 - rank]]
    return torch.cat(rows)


def ring_by_steps(
    kernel: AttentionKernel, q: Tensor, k: Tensor, v: Tensor, grad: Tensor, lengths: list[int], size: int, scale: float
) -> list[Tensor]:
    """Return output and gradients of q, k and v of the whole pack; all lengths must be multiples of ``2 * size``."""
    segments = RingSegments.of(boundaries(lengths).to(q.device), size)
    parts = [zigzag_rows(lengths, size, rank).to(q.device) for rank in range(size)]
    outs = torch.empty_like(q)
    sums = [torch.zeros_like(x, dtype=torch.float32) for x in (q, k, v)]
    for rank, mine in enumerate(parts):
        plans = [ring_step(step, rank, size, segments, scale) for step in range(size)]
        owners = [parts[(rank - step) % size] for step in range(size)]
        merged: tuple[Tensor, Tensor] | None = None
        for plan, theirs in zip(plans, owners, strict=True):
            queries, keys = mine[plan.q_rows], theirs[plan.k_rows]
            part = kernel.forward(q[queries], k[keys], v[keys], plan.pairing)
            if merged is None:
                merged = part[0].to(part[1].dtype), part[1]
                continue
            out, lse = merged
            rows = plan.q_rows
            out[rows], lse[:, rows] = merge_attention((out[rows], lse[:, rows]), part)
        assert merged is not None
        outs[mine] = merged[0].to(q.dtype)
        for plan, theirs in zip(plans, owners, strict=True):
            queries, keys = mine[plan.q_rows], theirs[plan.k_rows]
            lse = merged[1][:, plan.q_rows].contiguous()
            saved = Saved(q[queries], k[keys], v[keys], outs[queries], lse)
            grads = kernel.backward(grad[queries], saved, plan.pairing)
            for total, rows, part in zip(sums, (queries, keys, keys), grads, strict=True):
                total[rows] += part.float()
    return [outs, *sums]
