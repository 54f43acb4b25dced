"""Per-sequence sums and means of flat per-token tensors."""

from __future__ import annotations

import torch
from torch import Tensor


def segment_sum(x: Tensor, lengths: Tensor) -> Tensor:
    """Sum of (R,) ``x`` over consecutive segments of ``lengths`` (S,): (S,), differentiable."""
    return torch.segment_reduce(x, "sum", lengths=lengths)


def masked_segment_mean(x: Tensor, mask: Tensor, lengths: Tensor) -> Tensor:
    """Mean of ``x`` over the True entries of ``mask`` in every segment: (S,); 0 for a segment without any."""
    counts = segment_sum(mask.to(x.dtype), lengths)
    return segment_sum(torch.where(mask, x, 0.0), lengths) / counts.clamp_min(1)


def spread_over_tokens(per_sequence: Tensor, lengths: Tensor, total: int) -> Tensor:
    """Repeat (S,) values over each segment's tokens: (R,), differentiable."""
    return per_sequence.repeat_interleave(lengths, output_size=total)
