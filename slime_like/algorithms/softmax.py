"""Sums over rows of logits, and gradients of what is made of them. Sums are float32, or float64 for float64 logits."""

import torch
from torch import Tensor

RowValues = tuple[Tensor, Tensor, Tensor]
RowGradients = tuple[Tensor, Tensor, Tensor | None]

LEAST_MAXIMUM = torch.finfo(torch.float32).min / 4
"""Maximum of a row in which every token is forbidden: finite, so that its sums are 0 and not nan."""

# exp of it, and of anything below, is 0 in float64 too.
_LEAST_SHIFT = -1000.0


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """float64 stays, everything else is computed and accumulated in float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def row_sums(
    x: Tensor, column: Tensor, overwrite: bool, forbids: bool = True
) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
    """Return of every row of (n, V) its maximum m, and sum of exp(x - m), of exp(x - m) (x - m), and x at ``column``.

    Args:
        overwrite: use the memory of ``x`` for scratch.
        forbids: ``x`` may have forbidden tokens (-inf). This costs one more pass over the rows.
    """
    target = x.gather(1, column[:, None]).squeeze(1)
    maximum = x.amax(1).clamp_min_(LEAST_MAXIMUM)
    shifted = torch.sub(x, maximum[:, None], out=x if overwrite else None)
    weights = shifted.exp()
    total = weights.sum(1)
    if forbids:  # a forbidden token has weight 0; the product must be 0 too, not nan
        shifted.clamp_min_(torch.finfo(x.dtype).min)
    return maximum, (total, shifted.mul_(weights).sum(1), target)


def row_slopes(
    softmax: RowValues, grads: RowGradients, temperatures: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Return (n,) a, b and t, by which the gradient of a logit is ``p (a + b (x - m))``, and t more at the target.

    ``d logprob = onehot - p`` and ``d H = -p (log p + H)``; x is the scaled logit, m the row's maximum, and p its
    probability. Division by the temperature is part of a, b and t. Without a gradient of entropies b is ``None``.
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
    """Gradient of the logits that (n, V) temperature-scaled ``x`` were made of.

    The log-sum-exp comes as the maximum and what it is above it: where logits are large, their sum is rounded to a
    multiple of 1e-5 and more, and every probability with it.

    Args:
        column: (n,) of the targets.
        softmax: (n,) maximum, log-sum-exp above it, and entropy, of the whole vocabulary.
        grads: (n,) of logprobs, of those whose target is one of these columns (else 0), and of entropies, if they have
            one.
        overwrite: the result takes the memory of ``x``.
        forbids: ``x`` may have forbidden tokens (-inf). With a gradient of entropies this costs one more pass.
    """
    maximum, log_total, _ = softmax
    constant, slope, of_target = row_slopes(softmax, grads, temperatures)
    dx = torch.sub(x, maximum[:, None], out=x if overwrite else None)
    per_weight = (-log_total).exp()  # p = per_weight * exp(shifted), log p = shifted - log_total
    if slope is None:
        dx.exp_().mul_((constant * per_weight)[:, None])
    else:
        weights = dx.exp()
        if forbids:  # a forbidden token has weight 0; what it is multiplied by has to be finite, whatever the gradient
            dx.clamp_min_(_LEAST_SHIFT)
        dx.mul_((slope * per_weight)[:, None]).add_((constant * per_weight)[:, None]).mul_(weights)
    return dx.scatter_add_(1, column[:, None], of_target[:, None])
