"""Rejection of sequences on which the engine's policy and the trainer's differ too much."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from slime_like.algorithms.losses.kl import kl_estimate
from slime_like.algorithms.segments import masked_segment_max, masked_segment_mean, masked_segment_sum
from slime_like.algorithms.tensor_checks import require_alike, require_bool_mask

if TYPE_CHECKING:
    from slime_like.config.algorithm import RejectionConfig  # needs pydantic, which this layer doesn't

_OVER = {"sum": masked_segment_sum, "mean": masked_segment_mean, "max": masked_segment_max}


def kept_sequences(
    rejection: RejectionConfig, old_logprobs: Tensor, behaviour_logprobs: Tensor, loss_mask: Tensor, lengths: Tensor
) -> Tensor:
    """Return (S,) bool, False for a sequence whose divergence from the engine to the trainer exceeds the bound.

    The divergence is the sum, mean or maximum over loss-carrying tokens of k2 or k3 of KL(engine || trainer) (Schulman
    2020), which are never negative; so a low ratio rejects like a high one. (verl 0.9.1's k1 bounds only one side.)

    Args:
        rejection: estimator, how it is combined over tokens, and the bound in nats.
        old_logprobs, behaviour_logprobs: (R,) under the trainer at the start of the step, and the engine.
        loss_mask: (R,) bool.
        lengths: (S,).

    Raises:
        ValueError: shapes that differ, or a mask that isn't bool.
    """
    require_bool_mask(loss_mask)
    require_alike(loss_mask=loss_mask, old_logprobs=old_logprobs, behaviour_logprobs=behaviour_logprobs)
    divergence = kl_estimate(behaviour_logprobs, old_logprobs.detach(), rejection.estimator)
    return _OVER[rejection.over](divergence.masked_fill(~loss_mask, 0.0), loss_mask, lengths) <= rejection.bound
