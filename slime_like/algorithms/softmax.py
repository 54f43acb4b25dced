"""Sums over rows of logits, and gradients of what is made of them. Sums are float32, or float64 for float64 logits."""

import torch
from torch import Tensor

RowValues = tuple[Tensor, Tensor, Tensor]
RowGradients = tuple[Tensor, Tensor, Tensor | None]
# exp of it, and of anything below, is 0 in float64 too.
_LEAST_SHIFT = -1000.0


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """float64 stays, everything else is computed and accumulated in float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def row_sums(x: Tensor, column: Tensor, overwrite: bool) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
    """Return of every row of (n, V) its maximum m, and sum of exp(x - m), of exp(x - m) (x - m), and x at ``column``.

    With ``overwrite`` the memory of ``x`` is used for scratch.
    """
    target = x.gather(1, column[:, None]).squeeze(1)
    maximum = x.amax(1).clamp_min_(torch.finfo(x.dtype).min / 4)  # of a shard without a permitted token: its sums are 0
    shifted = torch.sub(x, maximum[:, None], out=x if overwrite else None)
    weights = shifted.exp()
    total = weights.sum(1)
    # A forbidden token (-inf) has weight 0; the product must be 0 too, not nan.
    return maximum, (total, shifted.clamp_min_(torch.finfo(x.dtype).min).mul_(weights).sum(1), target)


def logit_gradient(
    x: Tensor,
    temperatures: Tensor | None,
    column: Tensor,
    softmax: RowValues,
    grads: RowGradients,
    overwrite: bool,
) -> Tensor:
    """Gradient of the logits that (n, V) temperature-scaled ``x`` were made of.

    ``d logprob = onehot - p`` and ``d H = -p (log p + H)``. The log-sum-exp comes as the maximum and what it is above
    it: where logits are large, their sum is rounded to a multiple of 1e-5 and more, and every probability with it.

    Args:
        column: (n,) of the targets.
        softmax: (n,) maximum, log-sum-exp above it, and entropy, of the whole vocabulary.
        grads: (n,) of logprobs, of those whose target is one of these columns (else 0), and of entropies, if they have
            one.
        overwrite: the result takes the memory of ``x``.
    """
    maximum, log_total, entropy = softmax
    grad_logprobs, grad_targets, grad_entropy = grads
    dx = torch.sub(x, maximum[:, None], out=x if overwrite else None)
    per_weight = (-log_total).exp()  # p = per_weight * exp(shifted), log p = shifted - log_total
    if grad_entropy is None:
        dx.exp_().mul_((-grad_logprobs * per_weight)[:, None])
    else:
        weights = dx.exp()
        constant = grad_entropy * (log_total - entropy) - grad_logprobs
        # A forbidden token (-inf) has weight 0; what it is multiplied by has to be finite, whatever the gradient.
        dx.clamp_min_(_LEAST_SHIFT).mul_((-grad_entropy * per_weight)[:, None])
        dx.add_((constant * per_weight)[:, None]).mul_(weights)
    dx.scatter_add_(1, column[:, None], grad_targets[:, None])
    return dx if temperatures is None else dx.div_(temperatures.to(dx.dtype)[:, None])
