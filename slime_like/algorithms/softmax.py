"""Softmax sums over rows of logits, and their gradients, in float32 (float64 for float64 logits).

With truncated sampling, only a row's support counts: the tokens that its token was sampled from.
"""

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


def forbid_outside(x: Tensor, supports: Tensor, start: int) -> Tensor:
    """Set logits outside of the supports to -inf, in place, without reading anything back from a device.

    Args:
        x: (n, V) logits of the vocabulary's columns from ``start`` on.
        supports: (n, K) token ids in any order, padded with -1. A row of only -1 is the whole vocabulary.
    """
    columns = supports.long() - start
    is_elsewhere = (columns < 0) | (columns >= x.shape[1]) | (supports < 0)
    allowed = torch.zeros(x.shape[0], x.shape[1] + 1, dtype=torch.bool, device=x.device)
    allowed.scatter_(1, columns.masked_fill(is_elsewhere, x.shape[1]), True)
    is_whole = (supports < 0).all(1, keepdim=True)
    return x.masked_fill_(~(allowed[:, :-1] | is_whole), float("-inf"))


def padded(token_ids: Tensor, sizes: Tensor, tokens: Tensor) -> Tensor:
    """Return the supports of ``tokens``, (n, K) int32 padded with -1, where K is the size of the largest.

    Args:
        token_ids, sizes: ``support_ids`` and ``support_sizes`` of a pack, on the host.
        tokens: (n,) int64 indices into ``sizes``.
    """
    own = sizes[tokens].long()
    columns = torch.arange(max(1, int(own.max())) if len(own) else 1)
    places = (sizes.cumsum(0) - sizes)[tokens][:, None] + columns
    kept = torch.cat([token_ids, token_ids.new_zeros(1)])[places.clamp_max_(len(token_ids))]
    return kept.masked_fill_(columns >= own[:, None], -1)


def are_in(supports: Tensor, tokens: Tensor) -> Tensor:
    """Return (n,) bool, True if the token is in its support."""
    return (supports == tokens[:, None]).any(1) | (supports < 0).all(1)
