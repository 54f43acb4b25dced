"""Estimators of KL(policy || reference) from one sampled token (Schulman, "Approximating KL Divergence", 2020).

With ``d = log pi - log ref`` at a token sampled from pi: k1 = d, k2 = d^2 / 2, k3 = exp(-d) - 1 + d. k1 and k3 are
unbiased *values*. As a *loss* on samples of the current policy, k1 has zero expected gradient, k2 has exactly the
gradient of the reverse KL, and k3 that of the forward KL: a biased one. Weighted by pi / pi_old without detaching,
k1 and k3 have the exact reverse-KL gradient (DeepSeek-V3.2, section 3.1), also off-policy.
"""

from __future__ import annotations

import torch
from torch import Tensor

KL_ESTIMATORS = ("k1", "k2", "k3")


def kl_estimate(logprobs: Tensor, ref_logprobs: Tensor, estimator: str = "k3") -> Tensor:
    """Per-token estimate, differentiable with respect to ``logprobs``.

    Args:
        logprobs, ref_logprobs: (R,) of the same tokens, sampled from the policy.
        estimator: k1, k2 or k3.

    Raises:
        ValueError: unknown estimator.
    """
    difference = logprobs - ref_logprobs
    if estimator == "k1":
        return difference
    if estimator == "k2":
        return 0.5 * difference.square()
    if estimator == "k3":
        # expm1 keeps the precision that exp(-d) - 1 loses where policy and reference nearly agree.
        return torch.expm1(-difference) + difference
    raise ValueError(f"unknown KL estimator {estimator!r}; known: {', '.join(KL_ESTIMATORS)}")
