"""The critic's loss."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


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
    """``0.5 * max((v - R)^2, (v_old + clamp(v - v_old, -clip, clip) - R)^2)``, weighted and summed, undivided.

    Source: the clipped value objective of OpenAI Baselines' PPO (Engstrom et al., arXiv:2005.12729, section 3).

    Args:
        values: (R,) with graph.
        old_values: (R,) when the batch was sampled.
        returns: (R,) targets, from ``gae``.
        loss_mask: (R,) bool.
        token_weights: (R,).
        clip: largest change of a value that is rewarded; none is off.
    """
    error = (values - returns).square()
    won = torch.zeros_like(loss_mask)
    if clip is not None:
        bounded = (old_values + (values - old_values).clamp(-clip, clip) - returns).square()
        won = (bounded > error) & loss_mask
        error = torch.maximum(error, bounded)
    per_token = torch.where(loss_mask, 0.5 * error, 0.0)
    return ValueOutput((per_token * token_weights).sum(), won.sum())
