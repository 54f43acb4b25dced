"""Estimators of KL(policy || reference) from one sampled token (Schulman, "Approximating KL Divergence", 2020).

With ``d = log pi - log ref`` at a token sampled from pi: k1 = d, k2 = d^2 / 2, k3 = exp(-d) - 1 + d. k1 and k3 are
unbiased *values*. As a *loss* on samples of the current policy, k1 has zero expected gradient, k2 has exactly the
gradient of the reverse KL, and k3 has the gradient of the forward KL, which is biased. Weighted by pi / pi_old without
detaching, k1 and k3 have the exact reverse-KL gradient (DeepSeek-V3.2, section 3.1), even off-policy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from slime_like.algorithms.importance import LOG_RATIO_BOUND, log_ratio
from slime_like.algorithms.promise import Promise
from slime_like.algorithms.segments import (
    masked_segment_max,
    masked_segment_mean,
    masked_segment_sum,
    require_alike,
    require_per_token,
)
from slime_like.plugins.resolve import resolve_callable

if TYPE_CHECKING:
    from slime_like.config.algorithm import RejectionConfig  # needs pydantic, which this layer doesn't

_LOW_VAR_BOUND = 10.0
_OVER = {"sum": masked_segment_sum, "mean": masked_segment_mean, "max": masked_segment_max}


@Promise(None, weighted="KL", rewarded="KL of responses")
def k1(difference: Tensor) -> Tensor:
    """``d``: unbiased, of high variance, negative for about half of the tokens (Schulman 2020, k1)."""
    return difference


@Promise("KL")
def k2(difference: Tensor) -> Tensor:
    """``d^2 / 2``: biased as a value, with exactly the gradient of the reverse KL on-policy (Schulman 2020, k2)."""
    return 0.5 * difference.square()


@Promise("forward KL", weighted="KL")
def k3(difference: Tensor) -> Tensor:
    """``exp(-d) - 1 + d``: unbiased, never negative (Schulman 2020, k3; GRPO, arXiv:2402.03300, eq. 4).

    Constant, without gradient, below d = -20 (``importance.py``).
    """
    # expm1 keeps the precision that exp(-d) - 1 loses where policy and reference nearly agree.
    bounded = difference.clamp_min(-LOG_RATIO_BOUND)
    return torch.expm1(-bounded) + bounded


@Promise("forward KL", weighted="KL")
def low_var_kl(difference: Tensor) -> Tensor:
    """``min(k3, 10)`` (``low_var_kl`` in verl and slime, 2025): a token beyond the bound has no gradient."""
    return k3(difference).clamp_max(_LOW_VAR_BOUND)


KLEstimator = Callable[[Tensor], Tensor]
"""Function from (R,) ``log pi - log ref``, between -20,000 and 20,000, to (R,) nats."""

KL_ESTIMATORS: Mapping[str, KLEstimator] = MappingProxyType({"k1": k1, "k2": k2, "k3": k3, "low_var_kl": low_var_kl})


def find_kl_estimator(name: str) -> KLEstimator:
    """Return the estimator with this name, a key of ``KL_ESTIMATORS`` or `package.module:name`.

    Raises:
        ValueError: an unknown name, or an object that can't be called. A custom estimator raises it when called if its
            result isn't one value per token.
    """
    found = resolve_callable("KL estimator", name, KL_ESTIMATORS)
    if name in KL_ESTIMATORS:
        return found

    def checked(difference: Tensor) -> Tensor:
        estimate = found(difference)
        require_per_token(f"KL estimator {name!r}", estimate, difference)
        return estimate

    return checked


def kl_estimate(logprobs: Tensor, ref_logprobs: Tensor, estimator: str | KLEstimator = "k3") -> Tensor:
    """Estimate the KL divergence per token, differentiable with respect to ``logprobs``.

    Args:
        logprobs, ref_logprobs: (R,) of the same tokens, sampled from the policy of ``logprobs``. Off-policy, weight
            every estimate by pi / pi_sampled.
        estimator: k1, k2, k3, low_var_kl, or a function of ``logprobs - ref_logprobs`` or its import path.

    Returns:
        (R,) nats.

    Raises:
        ValueError: an unknown estimator, or tensors of different shapes.

    Example:
        >>> kl_estimate(torch.tensor([-1.0]), torch.tensor([-1.5]), "k2")
        tensor([0.1250])
    """
    require_alike(logprobs=logprobs, ref_logprobs=ref_logprobs)
    compute = find_kl_estimator(estimator) if isinstance(estimator, str) else estimator
    return compute(log_ratio(logprobs, ref_logprobs))


def kept_sequences(
    rejection: RejectionConfig, old_logprobs: Tensor, behaviour_logprobs: Tensor, loss_mask: Tensor, lengths: Tensor
) -> Tensor:
    """Return (S,) bool, False for a sequence whose divergence from the engine to the trainer exceeds the bound.

    The divergence is the sum, mean or maximum over loss-carrying tokens of k2 or k3 of KL(engine || trainer) (Schulman
    2020), which are never negative; so a low ratio rejects like a high one. (verl 0.9.1's k1 bounds only one side.)

    Args:
        rejection: estimator, how it is combined over tokens, and the bound in nats.
        old_logprobs, behaviour_logprobs: (R,) under the trainer at the start of the step, and the engine.
        loss_mask: (R,) bool.
        lengths: (S,).
    """
    divergence = kl_estimate(behaviour_logprobs, old_logprobs.detach(), rejection.estimator)
    return _OVER[rejection.over](divergence.masked_fill(~loss_mask, 0.0), loss_mask, lengths) <= rejection.bound
