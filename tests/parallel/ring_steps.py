"""Run the ring's steps of all ranks one after another in one process: its arithmetic without its communication."""

from itertools import pairwise

import torch
from torch import Tensor

from backends.common.attention.kernels import AttentionKernel, Saved, merge_attention
from backends.common.attention.packed_attention import RingSegments, ring_step
from tests.parallel.dense import boundaries


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
