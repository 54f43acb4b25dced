"""The critic's loss."""

import torch
from torch import Tensor

from slime_like.algorithms.losses.sums import ValueSums
from slime_like.algorithms.segments import require_alike, require_bool_mask


def value_loss(
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    loss_mask: Tensor,
    token_weights: Tensor,
    clip: float | None = None,
) -> tuple[Tensor, ValueSums]:
    """Return ``0.5 * max((v - R)^2, (v_old + clamp(v - v_old, -clip, clip) - R)^2)``, weighted and summed.

    Source: the clipped value objective of OpenAI Baselines' PPO (Engstrom et al., arXiv:2005.12729, section 3).

    Args:
        values: (R,) with graph.
        old_values: (R,) when the batch was sampled.
        returns: (R,) targets, from ``gae``.
        loss_mask: (R,) bool.
        token_weights: (R,).
        clip: largest change of a value that lowers the loss; ``None`` for no bound.

    Returns:
        The loss, a scalar with graph, and detached metrics; a token counts as clipped if the second term won. Values on
        masked tokens (inf and nan too) have no effect.

    Raises:
        ValueError: shapes differ, or the mask isn't bool.
    """
    require_bool_mask(loss_mask)
    require_alike(
        values=values, old_values=old_values, returns=returns, token_weights=token_weights, loss_mask=loss_mask
    )
    values, old_values, returns, token_weights = (
        torch.where(loss_mask, tensor, 0.0) for tensor in (values, old_values, returns, token_weights)
    )
    error = (values - returns).square()
    won = torch.zeros_like(loss_mask)
    if clip is not None:
        change = values - old_values
        bounded = (old_values + change.clamp(-clip, clip) - returns).square()
        won = (bounded > error) & (change.abs() > clip) & loss_mask  # otherwise they differ only by rounding
        error = torch.maximum(error, bounded)
    loss = (0.5 * error * token_weights).sum()
    return loss, _sums(loss, values, old_values, returns, won, loss_mask)


@torch.no_grad()
def _sums(
    loss: Tensor, values: Tensor, old_values: Tensor, returns: Tensor, won: Tensor, loss_mask: Tensor
) -> ValueSums:
    error = returns.double() - values.double()
    gap = torch.cat([values - old_values, values.new_zeros(1)]).abs().amax()
    entries = loss, values, returns, returns.double().square(), error, error.square(), won, loss_mask, gap
    return ValueSums(*[each.detach().double().sum() for each in entries])
