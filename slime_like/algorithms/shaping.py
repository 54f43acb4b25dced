"""Terms to add to rewards before computing advantages."""

import torch
from torch import Tensor

from slime_like.algorithms.losses.kl import KLEstimator, kl_estimate
from slime_like.algorithms.segments import require_alike, require_bool_mask, require_lengths, segment_sum


def overlong_penalty(response_lens: Tensor, max_len: int, buffer: int, factor: float = 1.0) -> Tensor:
    """Compute DAPO's soft penalty for long responses (arXiv:2503.14476, eq. 13), to add to the reward.

    The penalty is 0 up to ``max_len - buffer`` tokens, falls linearly to ``-factor`` at ``max_len``, and stays there.

    Args:
        response_lens: (N,).
        max_len: response limit, in tokens.
        buffer: width of the linear part, in tokens, 1 to ``max_len``.
        factor: size of the largest penalty.

    Returns:
        (N,) float32, at most 0.

    Example:
        >>> overlong_penalty(torch.tensor([15, 18, 20, 25]), max_len=20, buffer=4)
        tensor([ 0.0000, -0.5000, -1.0000, -1.0000])
    """
    excess = response_lens.to(torch.float32) - (max_len - buffer)
    return factor * (-excess / buffer).clamp(-1.0, 0.0)


def kl_penalty(
    logprobs: Tensor,
    ref_logprobs: Tensor,
    loss_mask: Tensor,
    response_lens: Tensor,
    coefficient: float,
    estimator: str | KLEstimator = "k1",
) -> tuple[Tensor, Tensor]:
    """Compute the KL term for the reward instead of the loss (InstructGPT, arXiv:2203.02155, eq. 2).

    Args:
        logprobs, ref_logprobs: (R,) under the policy that sampled, and the reference.
        loss_mask: (R,) bool; masked tokens get no penalty.
        response_lens: (S,).
        coefficient: beta.
        estimator: as for ``kl_estimate``; k1 is unbiased here because no gradient flows.

    Returns:
        Penalties without graph: (R,) per token (for GAE), and (S,) their sums per sequence, computed in float64 and
        returned in float32 at least.

    Raises:
        ValueError: an unknown estimator, shapes that don't fit together, or a mask that isn't bool.
    """
    require_bool_mask(loss_mask)
    require_alike(logprobs=logprobs, ref_logprobs=ref_logprobs, loss_mask=loss_mask)
    require_lengths(response_lens, logprobs.numel())
    estimate = kl_estimate(logprobs.detach(), ref_logprobs, estimator)
    per_token = torch.where(loss_mask, -coefficient * estimate, 0.0)
    precision = torch.promote_types(per_token.dtype, torch.float32)
    return per_token, segment_sum(per_token.double(), response_lens).to(precision)
