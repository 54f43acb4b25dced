"""Flat per-token tensors: checks of their shapes, and sums and means per sequence."""

from collections.abc import Sequence

import torch
from torch import Tensor


def require_alike(**given: Tensor | None) -> None:
    """Raise ``ValueError`` if a tensor's shape differs from the first one's. ``None`` is skipped."""
    (measure, first), *others = ((name, tensor) for name, tensor in given.items() if tensor is not None)
    for name, tensor in others:
        if tensor.shape != first.shape:
            shapes = f"{name} {tuple(tensor.shape)} and {measure} {tuple(first.shape)}"
            raise ValueError(f"{shapes} differ; give one entry of each per token")


def require_per_token(what: str, value: object, like: Tensor) -> None:
    """Raise ``ValueError`` if custom code didn't return one value per token."""
    if not isinstance(value, Tensor) or value.shape != like.shape:
        returned = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
        raise ValueError(f"{what} returned {returned} for {like.numel()} tokens; return one value per token, (R,)")


def require_known_targets(targets: Tensor, vocab_size: int) -> None:
    """Raise ``ValueError`` for ids beyond the vocabulary. Waits for a device, since it reads the values."""
    if targets.numel() and int(targets.max()) >= vocab_size:
        raise ValueError(
            f"targets: id {int(targets.max())} is beyond the vocabulary of {vocab_size}; give smaller ids, or "
            "a negative one (-100) for tokens without a score"
        )


def require_bool_mask(mask: Tensor) -> None:
    """Raise ``ValueError`` for a mask of numbers, which indexing would interpret as positions."""
    if mask.dtype != torch.bool:
        raise ValueError(f"loss_mask is {mask.dtype}; give a bool, True where a token carries loss")


def require_temperatures(temperatures: Tensor) -> None:
    """Raise ``ValueError`` unless all temperatures are positive and finite."""
    fits = (temperatures > 0) & torch.isfinite(temperatures)
    if not bool(fits.all()):
        where = int((~fits).flatten().nonzero()[0])
        raise ValueError(
            f"temperature {float(temperatures.flatten()[where])} (entry {where}) cannot scale logits; give a positive "
            "one (1 for greedy samples)"
        )


def expanded_temperatures(temperatures: Tensor | float, targets: Tensor) -> Tensor:
    """Return one checked temperature per target, from a number or a tensor that expands to ``targets``' shape."""
    if not isinstance(temperatures, Tensor):
        temperatures = torch.tensor(temperatures, dtype=torch.float64, device=targets.device)
    require_temperatures(temperatures)
    return temperatures.expand(targets.shape).contiguous()


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
