"""Sums and means per sequence of flat per-token tensors."""

from collections.abc import Sequence

import torch
from torch import Tensor


def require_lengths(lengths: Tensor, total: int) -> None:
    """Raise ``ValueError`` unless the lengths are at least 0 and add up to ``total`` tokens."""
    if lengths.ndim != 1 or int(lengths.sum()) != total or (lengths < 0).any():
        raise ValueError(
            f"response_lens {tuple(lengths.shape)} of {lengths.dtype} add up to {lengths.sum().item()}, but there are "
            f"{total} response tokens; give the (S,) integer lengths of the sequences they belong to"
        )


def segment_sum(x: Tensor, lengths: Tensor) -> Tensor:
    """Sum (R,) ``x`` over consecutive segments of (S,) ``lengths``. Return (S,), differentiable.

    Check the lengths first: torch would read them back from the device twice for that.
    """
    return torch.segment_reduce(x, "sum", lengths=lengths, unsafe=True)


# Values per sequence are float64, in forward and backward: the exponential of a float32 sum over hundreds of tokens, or
# a gradient summed over them, would be off by more than 1e-6.
def masked_segment_sum(x: Tensor, mask: Tensor, lengths: Tensor) -> Tensor:
    """Sum ``x`` over the True entries of ``mask`` in every segment. Return (S,) float64. Check ``lengths`` first."""
    return segment_sum(torch.where(mask, x, 0.0).double(), lengths)


def masked_segment_mean(x: Tensor, mask: Tensor, lengths: Tensor) -> Tensor:
    """Average ``x`` over the True entries of ``mask`` in every segment. Return (S,) float64, 0 if there are none."""
    return masked_segment_sum(x, mask, lengths) / segment_sum(mask.double(), lengths).clamp_min(1)


def masked_segment_max(x: Tensor, mask: Tensor, lengths: Tensor) -> Tensor:
    """Return the largest ``x``, at least 0, at True entries of ``mask`` in every segment, (S,) float64."""
    kept = torch.where(mask, x, 0.0).double()
    return torch.segment_reduce(kept, "max", lengths=lengths, initial=0.0, unsafe=True)


def spread_over_tokens(
    per_sequence: Tensor | Sequence[float], lengths: Tensor | Sequence[int], total: int | None = None
) -> Tensor:
    """Repeat each sequence's value over its tokens.

    Args:
        per_sequence: (S,). A list, such as the result of ``token_weights``, becomes float64.
        lengths: (S,) tokens of each sequence.
        total: sum of the lengths, if known. It saves waiting for a device.

    Returns:
        (R,), differentiable.

    Raises:
        ValueError: the numbers of values and lengths differ.

    Example:
        >>> spread_over_tokens(torch.tensor([0.5, -0.5]), [3, 1])
        tensor([ 0.5000,  0.5000,  0.5000, -0.5000])
    """
    if not isinstance(per_sequence, Tensor):
        device = lengths.device if isinstance(lengths, Tensor) else None
        per_sequence = torch.tensor(per_sequence, dtype=torch.float64, device=device)
    if not isinstance(lengths, Tensor):
        lengths = torch.tensor(lengths, dtype=torch.int64, device=per_sequence.device)
    if per_sequence.shape != lengths.shape:
        raise ValueError(
            f"per_sequence {tuple(per_sequence.shape)} and lengths {tuple(lengths.shape)} differ; give one per sequence"
        )
    return per_sequence.repeat_interleave(lengths, output_size=total)
