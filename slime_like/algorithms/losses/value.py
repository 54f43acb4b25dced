"""The critic's loss."""

from dataclasses import dataclass

import torch
from torch import Tensor

from slime_like.algorithms.tensor_checks import require_alike, require_bool_mask


@dataclass(slots=True)
class ValueOutput:
    """``loss``: scalar with graph, the weighted sum. ``clipped``: loss-carrying tokens whose clipped branch won."""

    loss: Tensor
    clipped: Tensor


def value_loss(
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    loss_mask: Tensor,
    token_weights: Tensor,
    clip: float | None = None,
) -> ValueOutput:
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
        The loss and the number of clipped tokens. Values on masked tokens (inf and nan too) have no effect.

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
        bounded = (old_values + (values - old_values).clamp(-clip, clip) - returns).square()
        won = (bounded > error) & loss_mask
        error = torch.maximum(error, bounded)
    return ValueOutput((0.5 * error * token_weights).sum(), won.sum())
