"""Draws of tokens: the inverse of a cumulative distribution in float64, and uniform numbers from seeds."""

from typing import NamedTuple

import torch
from torch import Tensor

_CHUNK_BYTES = 128 * 2**20


class Limits(NamedTuple):
    """Truncation limits, (B,) each, applied in the order min-p, top-k, top-p. ``min_ps`` is ``None`` if all are 0."""

    top_ks: Tensor
    top_ps: Tensor
    min_ps: Tensor | None


def draw(
    logprobs: Tensor,
    uniform: Tensor,
    limits: Limits | None,
    supported: Tensor | None = None,
    chunk_bytes: int = _CHUNK_BYTES,
) -> Tensor:
    """Draw from ``logprobs`` (B, V), with each row truncated by its limits, at ``uniform`` (B,) in [0, 1).

    Args:
        supported: (B,) bool, rows whose ``logprobs`` are replaced by logprobs over the truncated distribution, with
            -inf elsewhere.
        chunk_bytes: bound on one float64 temporary, in whole rows. There is one such temporary, or five with limits.

    Returns:
        (B,) int64 ids.
    """
    rows = max(1, chunk_bytes // (logprobs.shape[1] * torch.float64.itemsize))
    tokens = torch.empty(len(logprobs), dtype=torch.int64, device=logprobs.device)
    for start in range(0, len(logprobs), rows):
        part = slice(start, start + rows)
        probabilities = logprobs[part].double().exp_()
        if limits is not None:
            least = None if limits.min_ps is None else limits.min_ps[part]
            _truncate(probabilities, limits.top_ks[part], limits.top_ps[part], least)
        if limits is not None and supported is not None:
            within = logprobs[part] - probabilities.sum(dim=-1, keepdim=True).log().float()
            within.masked_fill_(probabilities == 0, float("-inf"))
            logprobs[part] = torch.where(supported[part, None], within, logprobs[part])
        cumulative = probabilities.cumsum_(dim=-1)
        total = cumulative[:, -1:]
        below = torch.nextafter(total, torch.zeros_like(total))  # because the product may be rounded up to the total
        drawn = torch.minimum(uniform[part, None] * total, below)
        tokens[part] = torch.searchsorted(cumulative, drawn, right=True)[:, 0]
    return tokens


def uniforms(seeds: Tensor, positions: Tensor) -> Tensor:
    """Return numbers (B,) float64 in [0, 1) with 53 random bits, from seeds and positions, (B,) int64 each."""
    bits = mix(mix(seeds) + positions)
    return ((bits >> 11) & ((1 << 53) - 1)).double() * 2.0**-53


def mix(value: Tensor) -> Tensor:
    """Apply SplitMix64's finalizer to each element of an int64 tensor, as unsigned numbers.

    Steele, Lea, Flood: Fast splittable pseudorandom number generators, OOPSLA 2014.
    """
    value = value + _signed(0x9E3779B97F4A7C15)
    value = (value ^ _shift_right(value, 30)) * _signed(0xBF58476D1CE4E5B9)
    value = (value ^ _shift_right(value, 27)) * _signed(0x94D049BB133111EB)
    return value ^ _shift_right(value, 31)


def _shift_right(value: Tensor, bits: int) -> Tensor:
    """Shift logically; torch's shift copies the sign bit."""
    return (value >> bits) & ((1 << (64 - bits)) - 1)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


def _truncate(probabilities: Tensor, top_ks: Tensor, top_ps: Tensor, min_ps: Tensor | None) -> None:
    if min_ps is not None:
        least = probabilities.amax(dim=-1, keepdim=True) * min_ps[:, None]
        probabilities.masked_fill_(probabilities < least, 0.0)
    ordered = probabilities.sort(dim=-1, descending=True)
    ranks = torch.arange(probabilities.shape[-1], device=probabilities.device)
    kept = ordered.values.masked_fill(ranks >= top_ks[:, None], 0.0)
    before, limit = kept.cumsum(dim=-1) - kept, top_ps[:, None]
    # With top_p 1, rounding must not cut the tail.
    kept.masked_fill_((limit < 1.0) & (before >= limit * kept.sum(dim=-1, keepdim=True)), 0.0)
    probabilities.scatter_(1, ordered.indices, kept)
