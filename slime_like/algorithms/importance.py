"""Correction for samples of another policy: the engine's, or an older version of the current one.

The engine's numerics, precision and (asynchronously) weights differ from the trainer's. The ratio
``rho = pi_old / pi_behaviour`` corrects for that, truncated (TIS) or masked (MIS, IcePop), per token or per sequence.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from slime_like.algorithms.promise import Promise
from slime_like.algorithms.segments import (
    masked_segment_mean,
    masked_segment_sum,
    require_alike,
    require_bool_mask,
    require_per_token,
    spread_over_tokens,
)
from slime_like.plugins.resolve import resolve, resolve_callable

if TYPE_CHECKING:
    from slime_like.config.algorithm import ImportanceConfig  # needs pydantic, which this layer doesn't


# These bounds keep every difference, product and exponential of logprobs and log ratios within float32.
#
# Values inside the bounds don't change. A value outside becomes the bound, with gradient 0. So a token that a masked
# vocabulary forbids (logprob -inf) has finite ratios and trains nothing. NaN stays NaN, because it shows a fault.
#
# The bound of log ratios is verl's (``verl/trainer/ppo/core_algos.py`` and ``rollout_corr_helper.py``). exp(20) is
# 4.9e8, far beyond every clip, and its product with any advantage, and sums of such products, fit into float32.
LOG_RATIO_BOUND = 20.0
LOGPROB_BOUND = 10_000.0


def bounded_logprobs(logprobs: Tensor) -> Tensor:
    """Clamp logprobs, infinite ones too, to +-``LOGPROB_BOUND``."""
    return logprobs.clamp(-LOGPROB_BOUND, LOGPROB_BOUND)


def log_ratio(logprobs: Tensor, other_logprobs: Tensor) -> Tensor:
    """Return ``log(pi / pi_other)`` of bounded logprobs: always finite, and 0 if both forbid the token."""
    return bounded_logprobs(logprobs) - bounded_logprobs(other_logprobs)


def bounded_exp(log_ratios: Tensor) -> Tensor:
    """Return the exponential of log ratios clamped to +-``LOG_RATIO_BOUND``."""
    return log_ratios.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()


Correction = Callable[[Tensor, float, float], tuple[Tensor, Tensor]]
"""Function from (R,) ratios, ``low`` and ``high`` to (R,) weights, and (R,) bool, True if a weight isn't the ratio."""


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
) -> tuple[Tensor, Tensor]:
    """Compute the factors with which samples of the engine's policy count as samples of the trainer's.

    Ratios are between exp(-20) and exp(20).

    Source: Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training" (TIS); Liu et al.
    2025, "When Speed Kills Stability: Demystifying RL Collapse from the Training-Inference Mismatch" (MIS, levels).

    Args:
        old_logprobs, behaviour_logprobs: (R,) under the trainer at the start of the step, and the engine.
        loss_mask: (R,) bool. Other tokens count in no ratio and get weight 1.
        response_lens: (S,), needed for the levels sequence and geometric, and for a veto.
        correction: a key of ``CORRECTIONS``, or a ``Correction`` or its import path.
        level: token, sequence or geometric: the function of that name.
        low, high: bounds of the ratio; truncate uses only ``high``.
        veto: if a token's own ratio is below it, its sequence gets weight 0 at any level. verl's
            ``rollout_token_veto_threshold`` and slime's ``mis_veto_threshold``, 1e-4 there.

    Returns:
        (R,) factors of the policy loss, and (R,) bool, True if a factor isn't the ratio. Both without graph.

    Raises:
        ValueError: an unknown correction or level, shapes that differ, a mask that isn't bool, missing
            ``response_lens``, or a custom correction that doesn't return weights of 0 or more and bools.
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
    return weights, changed


def configured_weights(
    config: ImportanceConfig,
    old_logprobs: Tensor,
    behaviour_logprobs: Tensor,
    loss_mask: Tensor,
    response_lens: Tensor | None,
    correction: Correction | None = None,
) -> tuple[Tensor, Tensor]:
    """Call ``importance_weights`` with the settings in ``config``, or with ``correction`` instead of its correction."""
    given, chosen = (old_logprobs, behaviour_logprobs, loss_mask, response_lens), correction or config.correction
    return importance_weights(*given, chosen, config.level, config.low, config.high, config.veto)


def mean_weight(weights: Tensor, loss_mask: Tensor, token_weights: Tensor) -> float:
    """Return the mean importance weight of a batch, with each token weighted as in the loss.

    Weights divided by it average 1: self-normalized importance sampling (Owen 2013, Monte Carlo theory, section 9.2;
    ``rollout_is_batch_normalize`` in verl). Give a whole batch, since a micro-batch's mean depends on the packing.

    Args:
        weights: (R,) from ``importance_weights``.
        loss_mask: (R,) bool.
        token_weights: (R,) of the loss sum.

    Returns:
        The mean, or 1 if all weights are 0.

    Raises:
        ValueError: shapes that differ.
    """
    require_alike(loss_mask=loss_mask, weights=weights, token_weights=token_weights)
    counted = torch.where(loss_mask, token_weights, 0.0).double()
    total = float((counted * torch.where(loss_mask, weights, 0.0)).sum())
    return total / float(counted.sum()) if total > 0 else 1.0


def find_correction(name: str) -> Correction:
    """Return the correction with this name, a key of ``CORRECTIONS`` or `package.module:name`.

    Raises:
        ValueError: an unknown name, or an object that can't be called. A custom correction raises it when called if
            its result isn't a weight of 0 or more and a bool per token.
    """
    found = resolve_callable("importance correction", name, CORRECTIONS)
    if name in CORRECTIONS:
        return found

    def checked(ratio: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
        made = found(ratio, low, high)
        what = f"importance correction {name!r}"
        if not isinstance(made, tuple) or len(made) != 2:
            raise ValueError(f"{what} returned a {type(made).__name__}; return weights and a bool mask of changes")
        weights, changed = made
        require_per_token(f"{what} (weights)", weights, ratio)
        require_per_token(f"{what} (changed)", changed, ratio)
        if changed.dtype != torch.bool or not bool((torch.isfinite(weights) & (weights >= 0)).all()):
            raise ValueError(f"{what} returned wrong values; return finite weights of 0 or more, and bools")
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
    """Return (R,) bool, False on every token of a sequence that is too far off-policy to learn *away* from.

    Such a sequence has a negative advantage, and its mean ``log pi_sampled - log pi_current`` over loss-carrying tokens
    exceeds ``threshold`` (DeepSeek-V3.2, section 3.1, "Off-Policy Sequence Masking").

    Args:
        logprobs, sampled_logprobs: (R,) under the current policy, and the one that sampled.
        advantages: (R,); the mean decides about a sequence's sign.
        loss_mask: (R,) bool.
        response_lens: (S,).
        threshold: nats per token.

    Raises:
        ValueError: shapes that differ.
    """
    require_alike(loss_mask=loss_mask, logprobs=logprobs, sampled_logprobs=sampled_logprobs, advantages=advantages)
    divergence = masked_segment_mean(log_ratio(sampled_logprobs, logprobs).detach(), loss_mask, response_lens)
    negative = masked_segment_mean(advantages, loss_mask, response_lens) < 0
    return ~spread_over_tokens(negative & (divergence > threshold), response_lens, logprobs.numel())


# ---------------------------------------------------------------------------------------------------------- corrections
@Promise()
def truncate(ratio: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    """``min(rho, high)``, TIS (Yao et al. 2025; V-trace, arXiv:1802.01561, section 4.1)."""
    return ratio.clamp_max(high), ratio > high


@Promise()
def clip(ratio: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    """``min(max(rho, low), high)``: truncation from both sides (slime's ``tis_clip_low``, 2025)."""
    return ratio.clamp(low, high), (ratio < low) | (ratio > high)


@Promise()
def mask(ratio: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    """``rho`` inside ``[low, high]``, 0 outside: MIS (Liu et al. 2025), per token IcePop (arXiv:2510.18855)."""
    outside = (ratio > high) | (ratio < low)
    return ratio.masked_fill(outside, 0.0), outside


# --------------------------------------------------------------------------------------------------------------- levels
@Promise(exact=False)
def token(log_ratios: Tensor, loss_mask: Tensor, response_lens: Tensor | None) -> Tensor:
    """Each token's own ratio: biased, with low variance (Yao et al. 2025)."""
    return log_ratios


@Promise()
def sequence(log_ratios: Tensor, loss_mask: Tensor, response_lens: Tensor) -> Tensor:
    """The product over the sequence's loss-carrying tokens: unbiased, with high variance (Liu et al. 2025)."""
    per_sequence = masked_segment_sum(log_ratios, loss_mask, response_lens)
    return spread_over_tokens(per_sequence, response_lens, log_ratios.numel())


@Promise(exact=False)
def geometric(log_ratios: Tensor, loss_mask: Tensor, response_lens: Tensor) -> Tensor:
    """The length-normalized root of the product (Liu et al. 2025; GSPO's ratio, arXiv:2507.18071, eq. 7)."""
    per_sequence = masked_segment_mean(log_ratios, loss_mask, response_lens)
    return spread_over_tokens(per_sequence, response_lens, log_ratios.numel())


CORRECTIONS: Mapping[str, Correction] = MappingProxyType(
    {"truncate": truncate, "clip": clip, "mask": mask, "tis": truncate, "mis": mask, "icepop": mask}
)
LEVELS: Mapping[str, Callable[..., Tensor]] = MappingProxyType(
    {"token": token, "sequence": sequence, "geometric": geometric}
)
