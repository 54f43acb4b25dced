"""Terms that are added to rewards before advantages are computed."""

from __future__ import annotations

import torch
from torch import Tensor

from slime_like.algorithms.losses.kl import kl_estimate
from slime_like.algorithms.segments import segment_sum


def overlong_penalty(response_lens: Tensor, max_len: int, buffer: int, factor: float = 1.0) -> Tensor:
    """DAPO's soft punishment of long responses (arXiv:2503.14476, eq. 13), to be added to the reward.

    0 up to ``max_len - buffer`` tokens, from there linearly down to ``-factor`` at ``max_len``, and ``-factor`` beyond.

    Args:
        response_lens: (N,).
        max_len: the response limit, in tokens.
        buffer: width of the linear part, in tokens.
        factor: largest penalty.

    Returns:
        (N,) float32, at most 0.

    Raises:
        ValueError: a buffer that is not between 1 and ``max_len``.
    """
    if not 1 <= buffer <= max_len:
        raise ValueError(f"overlong buffer={buffer} must lie between 1 and the response limit {max_len}")
    excess = response_lens.to(torch.float32) - (max_len - buffer)
    return -factor * (excess / buffer).clamp(0.0, 1.0)


def kl_penalty(
    logprobs: Tensor,
    ref_logprobs: Tensor,
    loss_mask: Tensor,
    response_lens: Tensor,
    coefficient: float,
    estimator: str = "k1",
) -> tuple[Tensor, Tensor]:
    """The KL term in the reward instead of the loss (InstructGPT, arXiv:2203.02155, eq. 2).

    Args:
        logprobs, ref_logprobs: (R,) under the policy that sampled, and the reference.
        loss_mask: (R,) bool; masked tokens are not penalised.
        response_lens: (S,).
        coefficient: beta.
        estimator: k1 is the unbiased one here, where no gradient flows.

    Returns:
        Penalties to add, without graph: (R,) per token (for GAE), and (S,) their sum per sequence, added up in float64
        and float32 at least.

    Raises:
        ValueError: an unknown estimator.
    """
    estimate = kl_estimate(logprobs.detach(), ref_logprobs, estimator)
    per_token = torch.where(loss_mask, -coefficient * estimate, 0.0)
    precision = torch.promote_types(per_token.dtype, torch.float32)
    return per_token, segment_sum(per_token.double(), response_lens).to(precision)
