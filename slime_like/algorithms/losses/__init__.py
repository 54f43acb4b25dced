"""Losses: one policy term by name (a new one goes into ``policy.py``), and what all losses share (``loss.py``)."""

from slime_like.algorithms.losses.grpo import BatchLoss, GRPOLoss
from slime_like.algorithms.losses.kl import kl_estimate
from slime_like.algorithms.losses.loss import Loss, build_loss
from slime_like.algorithms.losses.policy import POLICY_LOSSES
from slime_like.algorithms.losses.sums import LossOutput, LossSums
from slime_like.algorithms.losses.types import LossInputs, PolicyTerms
from slime_like.algorithms.losses.value import ValueOutput, value_loss

__all__ = [
    "POLICY_LOSSES",
    "BatchLoss",
    "GRPOLoss",
    "Loss",
    "LossInputs",
    "LossOutput",
    "LossSums",
    "PolicyTerms",
    "ValueOutput",
    "build_loss",
    "kl_estimate",
    "value_loss",
]
