"""Correcting for samples that another policy drew: the engine's, or an older version of this one.

The engine's numerics, precision and (asynchronously) weights differ from the trainer's. The ratio
``rho = pi_old / pi_behaviour`` corrects for it, truncated (TIS) or masked (MIS, IcePop), per token or per sequence.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from slime_like.algorithms.bounds import bounded_exp, log_ratio
from slime_like.algorithms.segments import (
    masked_segment_mean,
    masked_segment_sum,
    spread_over_tokens,
)
from slime_like.algorithms.tensor_checks import require_alike, require_bool_mask, require_per_token
from slime_like.plugins.resolve import resolve, resolve_callable

if TYPE_CHECKING:
    from slime_like.config.algorithm import AlgorithmConfig  # needs pydantic, which this layer does not

Correction = Callable[[Tensor, float, float], tuple[Tensor, Tensor]]
"""From (R,) ratios, ``low`` and ``high`` to (R,) weights, and (R,) bool, True where they are not the ratio."""


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
    correction: str | Correction,
    level: str = "token",
    low: float = 0.5,
    high: float = 2.0,
    veto: float | None = None,
) -> ImportanceWeights:
    """Factors that make samples of the engine's policy count as samples of the trainer's.

    - truncate (tis): ``min(rho, high)``.
    - clip: ``rho`` within ``[low, high]``, a truncation from both sides.
    - mask (mis, icepop): ``rho`` inside ``[low, high]``, 0 outside.
    - level token: each token's own ratio (biased, low variance); sequence: the product over the sequence's
      loss-carrying tokens (unbiased, high variance); geometric: its length-normalised root.
    - veto: whole sequences with a token's own ratio below it weigh 0, at any level (verl's
      ``rollout_token_veto_threshold``, slime's ``mis_veto_threshold``, there 1e-4).

    Ratios are between exp(-20) and exp(20) (``bounds.py``).

    Source: Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training" (TIS); Liu et al.
    2025, "When Speed Kills Stability: Demystifying RL Collapse from the Training-Inference Mismatch" (MIS, levels).

    Args:
        old_logprobs, behaviour_logprobs: (R,) under the trainer at the start of the step, and the engine.
        loss_mask: (R,) bool; other tokens count in no ratio and get weight 1.
        response_lens: (S,), needed for the levels sequence and geometric, and for a veto.
        correction: truncate, clip or mask, tis, mis or icepop; the import path of a function of (R,) ratios and the two
            bounds that returns weights and which it changed (bool), or the function.
        level: token, sequence or geometric.
        low, high: bounds of the ratio; truncate looks at ``high`` alone.
        veto: least ratio of a token whose sequence counts; none is off.

    Returns:
        The factors, the ratios they were made from, and where the two differ; nothing has a graph.

    Raises:
        ValueError: unknown correction or level (the known ones are listed), tensors that would be broadcast, a mask
            that is not bool, no ``response_lens`` where needed, or a custom correction that does not return weights of
            0 or more and bools, one of each per token.

    Example:
        >>> importance_weights(old_logprobs, behaviour_logprobs, loss_mask, None, "truncate", high=2.0).weights
    """
    require_bool_mask(loss_mask)
    require_alike(loss_mask=loss_mask, old_logprobs=old_logprobs, behaviour_logprobs=behaviour_logprobs)
    correct = find_correction(correction) if isinstance(correction, str) else correction
    per_level = resolve("importance level", level, LEVELS)
    if response_lens is None and (level != "token" or veto is not None):
        what = f"at level {level!r}" if level != "token" else f"with veto={veto}"
        raise ValueError(f"importance correction {what} needs response_lens; give (S,) response lengths")
    log_ratios = torch.where(loss_mask, log_ratio(old_logprobs, behaviour_logprobs), 0.0).detach()
    ratio = bounded_exp(torch.where(loss_mask, per_level(log_ratios, loss_mask, response_lens), 0.0))
    weights, changed = correct(ratio, low, high)
    if veto is not None and response_lens is not None:
        below = masked_segment_sum(log_ratios < math.log(veto), loss_mask, response_lens) > 0
        vetoed = spread_over_tokens(below, response_lens, ratio.numel()) & loss_mask
        weights, changed = weights.masked_fill(vetoed, 0.0), changed | vetoed
    return ImportanceWeights(weights, ratio, changed)


def configured_weights(
    config: AlgorithmConfig,
    old_logprobs: Tensor,
    behaviour_logprobs: Tensor,
    loss_mask: Tensor,
    response_lens: Tensor | None,
    correction: Correction | None = None,
) -> ImportanceWeights:
    """``importance_weights`` of the correction, level, bounds and veto in ``config``, or of this ``correction``."""
    return importance_weights(
        old_logprobs,
        behaviour_logprobs,
        loss_mask,
        response_lens,
        correction or config.importance_correction,
        config.importance_level,
        config.importance_low,
        config.importance_high,
        config.importance_veto,
    )


def mean_weight(weights: Tensor, loss_mask: Tensor, token_weights: Tensor) -> float:
    """Mean of a batch's importance weights, each token as it counts in the loss.

    Weights over it average 1: self-normalised importance sampling (Owen 2013, Monte Carlo theory, section 9.2; verl's
    ``rollout_is_batch_normalize``). Give a whole batch: the mean of a micro-batch depends on how sequences are packed.

    Args:
        weights: (R,) from ``importance_weights``.
        loss_mask: (R,) bool.
        token_weights: (R,) of the loss sum.

    Returns:
        The mean; 1 where no token has a weight, so that nothing is divided by 0.

    Raises:
        ValueError: tensors that would be broadcast.
    """
    require_alike(loss_mask=loss_mask, weights=weights, token_weights=token_weights)
    counted = torch.where(loss_mask, token_weights, 0.0).double()
    total = float((counted * torch.where(loss_mask, weights, 0.0)).sum())
    return total / float(counted.sum()) if total > 0 else 1.0


def find_correction(name: str) -> Correction:
    """The correction with this name, a key of ``CORRECTIONS`` or `package.module:name`, whose results are checked.

    Raises:
        ValueError: unknown name (the known ones are listed), or something that cannot be called; when called, a
            result that is not a weight of 0 or more and a bool per token.
    """
    found = resolve_callable("importance correction", name, CORRECTIONS)
    if name in CORRECTIONS:
        return found

    def checked(ratio: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
        made = found(ratio, low, high)
        what = f"importance correction {name!r}"
        if not isinstance(made, tuple) or len(made) != 2:
            raise ValueError(f"{what} returned a {type(made).__name__}; return weights, and which it changed")
        weights, changed = made
        require_per_token(f"{what} (weights)", weights, ratio)
        require_per_token(f"{what} (changed)", changed, ratio)
        if changed.dtype != torch.bool or not bool((torch.isfinite(weights) & (weights >= 0)).all()):
            raise ValueError(
                f"{what} returned weights that are no finite numbers of 0 or more, or no bools; correct it"
            )
        return weights.detach(), changed

    return checked


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

    Returns:
        Which tokens stay; those that carry no loss stay or go with their sequence.

    Raises:
        ValueError: tensors that would be broadcast.
    """
    require_alike(loss_mask=loss_mask, logprobs=logprobs, sampled_logprobs=sampled_logprobs, advantages=advantages)
    divergence = masked_segment_mean(log_ratio(sampled_logprobs, logprobs).detach(), loss_mask, response_lens)
    negative = masked_segment_mean(advantages, loss_mask, response_lens) < 0
    return ~spread_over_tokens(negative & (divergence > threshold), response_lens, logprobs.numel())


# ---------------------------------------------------------------------------------------------------------- corrections
def truncate(ratio: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    """``min(rho, high)``, TIS (Yao et al. 2025; V-trace, arXiv:1802.01561, section 4.1)."""
    return ratio.clamp_max(high), ratio > high


def clip(ratio: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    """``min(max(rho, low), high)``: truncation with a lower bound, too (slime's ``tis_clip_low``, 2025)."""
    return ratio.clamp(low, high), (ratio < low) | (ratio > high)


def mask(ratio: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    """``rho`` inside ``[low, high]``, 0 outside: MIS (Liu et al. 2025), per token IcePop (arXiv:2510.18855)."""
    outside = (ratio > high) | (ratio < low)
    return ratio.masked_fill(outside, 0.0), outside


# --------------------------------------------------------------------------------------------------------------- levels
def token(log_ratios: Tensor, loss_mask: Tensor, response_lens: Tensor | None) -> Tensor:
    """Each token's own ratio: biased, of low variance (Yao et al. 2025)."""
    return log_ratios


def sequence(log_ratios: Tensor, loss_mask: Tensor, response_lens: Tensor) -> Tensor:
    """The product over the sequence's loss-carrying tokens: unbiased, of high variance (Liu et al. 2025)."""
    per_sequence = masked_segment_sum(log_ratios, loss_mask, response_lens)
    return spread_over_tokens(per_sequence, response_lens, log_ratios.numel())


def geometric(log_ratios: Tensor, loss_mask: Tensor, response_lens: Tensor) -> Tensor:
    """The product's length-normalised root (Liu et al. 2025; GSPO's ratio, arXiv:2507.18071, eq. 7)."""
    per_sequence = masked_segment_mean(log_ratios, loss_mask, response_lens)
    return spread_over_tokens(per_sequence, response_lens, log_ratios.numel())


CORRECTIONS: Mapping[str, Correction] = MappingProxyType(
    {"truncate": truncate, "clip": clip, "mask": mask, "tis": truncate, "mis": mask, "icepop": mask}
)
LEVELS: Mapping[str, Callable[..., Tensor]] = MappingProxyType(
    {"token": token, "sequence": sequence, "geometric": geometric}
)
