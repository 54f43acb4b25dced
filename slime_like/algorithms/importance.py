"""Correcting for samples that another policy drew: the engine's, or an older version of this one.

The engine's numerics, precision and (asynchronously) weights differ from the trainer's. The ratio
``rho = pi_old / pi_behaviour`` corrects for it, truncated (TIS) or masked (MIS), per token or per sequence.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from slime_like.algorithms.segments import masked_segment_mean, segment_sum, spread_over_tokens

CORRECTIONS = ("none", "truncate", "mask")
LEVELS = ("token", "sequence", "geometric")


@dataclass(slots=True)
class ImportanceWeights:
    """``weights``: (R,) factors on the policy loss, detached. ``ratio``: before truncation. ``changed``: (R,) bool."""

    weights: Tensor
    ratio: Tensor
    changed: Tensor


def importance_weights(
    old_logprobs: Tensor,
    behaviour_logprobs: Tensor,
    loss_mask: Tensor,
    response_lens: Tensor | None,
    correction: str,
    level: str = "token",
    low: float = 0.5,
    high: float = 2.0,
) -> ImportanceWeights:
    """Factors that make samples of the engine's policy count as samples of the trainer's.

    - truncate (TIS): ``min(rho, high)``.
    - mask (MIS): ``rho`` inside ``[low, high]``, 0 outside.
    - level token: each token's own ratio (biased, low variance); sequence: the product over the sequence's
      loss-carrying tokens (unbiased, high variance); geometric: its length-normalised root.

    Source: Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training" (TIS); Liu et al.
    2025, "When Speed Kills Stability: Demystifying RL Collapse from the Training-Inference Mismatch" (MIS, levels).

    Args:
        old_logprobs, behaviour_logprobs: (R,) under the trainer at the start of the step, and the engine.
        loss_mask: (R,) bool; other tokens count in no ratio and get weight 1.
        response_lens: (S,), needed for the levels sequence and geometric.
        correction: truncate or mask.
        level: token, sequence or geometric.
        low, high: bounds of the ratio.

    Raises:
        ValueError: unknown correction or level, or no ``response_lens`` where they are needed.
    """
    if correction not in CORRECTIONS[1:] or level not in LEVELS:
        raise ValueError(
            f"unknown importance correction {correction!r} at level {level!r}; known: truncate and mask, at "
            f"{', '.join(LEVELS)}"
        )
    log_ratio = torch.where(loss_mask, old_logprobs - behaviour_logprobs, 0.0).detach()
    if level != "token":
        if response_lens is None:
            raise ValueError(f"importance correction at level {level!r} needs response_lens")
        log_ratio = _per_sequence(log_ratio, loss_mask, response_lens, level)
    ratio = torch.where(loss_mask, log_ratio, 0.0).exp()
    over = ratio > high
    if correction == "truncate":
        return ImportanceWeights(ratio.clamp_max(high), ratio, over)
    outside = over | (ratio < low)
    return ImportanceWeights(ratio.masked_fill(outside, 0.0), ratio, outside)


def off_policy_sequence_mask(
    logprobs: Tensor,
    sampled_logprobs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    response_lens: Tensor,
    threshold: float,
) -> Tensor:
    """(R,) bool, False on every token of a sequence that is too far off-policy to learn *away* from.

    Masked are sequences with a negative advantage whose mean ``log pi_sampled - log pi_current`` over loss-carrying
    tokens exceeds ``threshold`` (DeepSeek-V3.2, section 3.1, "Off-Policy Sequence Masking").

    Args:
        logprobs: (R,) current policy.
        sampled_logprobs: (R,) the policy that sampled.
        advantages: (R,); a sequence's sign is that of its mean.
        loss_mask: (R,) bool.
        response_lens: (S,).
        threshold: nats per token.
    """
    divergence = masked_segment_mean((sampled_logprobs - logprobs).detach(), loss_mask, response_lens)
    negative = masked_segment_mean(advantages, loss_mask, response_lens) < 0
    return ~spread_over_tokens(negative & (divergence > threshold), response_lens, logprobs.numel())


def _per_sequence(log_ratio: Tensor, loss_mask: Tensor, response_lens: Tensor, level: str) -> Tensor:
    if level == "sequence":
        per_sequence = segment_sum(log_ratio, response_lens)
    else:
        per_sequence = masked_segment_mean(log_ratio, loss_mask, response_lens)
    return spread_over_tokens(per_sequence, response_lens, log_ratio.numel())
