"""Softmax sums over rows of logits, and their gradients, in float32 (float64 for float64 logits)."""

import torch
from torch import Tensor

RowValues = tuple[Tensor, Tensor, Tensor]
RowGradients = tuple[Tensor, Tensor, Tensor | None]

LEAST_MAXIMUM = torch.finfo(torch.float32).min / 4
"""Maximum of a row in which every token is forbidden: finite, so its sums are 0 and not nan."""

# exp() of this, and of anything below, is 0 even in float64.
_LEAST_SHIFT = -1000.0


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the type for computing and accumulating: float64 for float64, float32 for everything else."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def row_sums(
    x: Tensor, column: Tensor, overwrite: bool, forbids: bool = True
) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
    """Return per row of (n, V): maximum m, then sum of exp(x - m), sum of exp(x - m) (x - m), and x at ``column``.

    Args:
        overwrite: use the memory of ``x`` as scratch space.
        forbids: ``x`` may have forbidden tokens (-inf), which costs one more pass over the rows.
    """
    target = x.gather(1, column[:, None]).squeeze(1)
    maximum = x.amax(1).clamp_min_(LEAST_MAXIMUM)
    shifted = torch.sub(x, maximum[:, None], out=x if overwrite else None)
    weights = shifted.exp()
    total = weights.sum(1)
    if forbids:  # a forbidden token has weight 0, and the product must be 0 too, not nan
        shifted.clamp_min_(torch.finfo(x.dtype).min)
    return maximum, (total, shifted.mul_(weights).sum(1), target)


def row_slopes(
    softmax: RowValues, grads: RowGradients, temperatures: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Return (n,) a, b and t: the gradient of a logit is ``p (a + b (x - m))``, plus t at the target.

    ``d logprob = onehot - p`` and ``d H = -p (log p + H)``; x is the scaled logit, m the row's maximum, and p the
    probability. a, b and t include the division by the temperature. Without a gradient of entropies, b is ``None``.
    """
    _, log_total, entropy = softmax
    grad_logprobs, grad_targets, grad_entropy = grads
    scales = 1.0 if temperatures is None else temperatures.to(log_total.dtype).reciprocal()
    constant = grad_logprobs * -scales
    if grad_entropy is None:
        return constant, None, grad_targets * scales
    slope = grad_entropy * -scales
    return constant - slope * (log_total - entropy), slope, grad_targets * scales


def logit_gradient(
    x: Tensor,
    temperatures: Tensor | None,
    column: Tensor,
    softmax: RowValues,
    grads: RowGradients,
    overwrite: bool,
    forbids: bool = True,
) -> Tensor:
    """Return the gradient of the unscaled logits, given the (n, V) temperature-scaled logits ``x``.

    The log-sum-exp is split into the maximum and the rest above it. For large logits, their sum would be rounded to a
    multiple of 1e-5 or more, and every probability with it.

    Args:
        column: (n,) of the targets.
        softmax: (n,) maximum, log-sum-exp above it, and entropy, over the whole vocabulary.
        grads: (n,) gradients of all logprobs, of logprobs whose target is one of these columns (else 0), and of
            entropies, if any.
        overwrite: write the result to the memory of ``x``.
        forbids: ``x`` may have forbidden tokens (-inf), which costs one more pass for a gradient of entropies.
    """
    maximum, log_total, _ = softmax
    constant, slope, of_target = row_slopes(softmax, grads, temperatures)
    dx = torch.sub(x, maximum[:, None], out=x if overwrite else None)
    per_weight = (-log_total).exp()  # p = per_weight * exp(shifted), log p = shifted - log_total
    if slope is None:
        dx.exp_().mul_((constant * per_weight)[:, None])
    else:
        weights = dx.exp()
        if forbids:  # a forbidden token has weight 0; its factor has to be finite for any gradient
            dx.clamp_min_(_LEAST_SHIFT)
        dx.mul_((slope * per_weight)[:, None]).add_((constant * per_weight)[:, None]).mul_(weights)
    return dx.scatter_add_(1, column[:, None], of_target[:, None])
