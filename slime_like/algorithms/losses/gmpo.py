"""Geometric-mean policy optimization."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from slime_like.algorithms.bounds import bounded_exp, log_ratio
from slime_like.algorithms.losses.policy import RatioLoss, require_option, required
from slime_like.algorithms.losses.types import LossInputs, PolicyTerms
from slime_like.algorithms.segments import masked_segment_mean, spread_over_tokens


@dataclass(frozen=True)
class GMPO(RatioLoss):
    """Geometric-mean policy optimization (arXiv:2507.20673): the sequence's geometric mean of clipped ratios.

    ``-A exp(mean over loss-carrying tokens of l)``, where ``l = log r`` is at most clip_high if A > 0, and at least
    -clip_low if A < 0. Every token carries its sequence's loss, so the reduction "samples" gives the paper's objective.
    A sequence has one advantage.

    Attributes:
        clip_low: lower bound of a token's log ratio, for negative advantages.
        clip_high: upper bound of a token's log ratio, for positive advantages.
    """

    clip_low: float = 0.4
    clip_high: float = 0.4

    name: ClassVar[str] = "gmpo"
    per_sequence: ClassVar[bool] = True

    def __post_init__(self) -> None:
        require_option("clip_low", self.clip_low, 0)
        require_option("clip_high", self.clip_high, 0)

    def __call__(self, inputs: LossInputs) -> PolicyTerms:
        lengths, advantages = required(inputs, "response_lens"), required(inputs, "advantages")
        logs = log_ratio(inputs.logprobs, required(inputs, "old_logprobs"))
        bounded = torch.where(advantages < 0, logs.clamp_min(-self.clip_low), logs.clamp_max(self.clip_high))
        mean = bounded_exp(masked_segment_mean(bounded, inputs.loss_mask, lengths))
        ratio = spread_over_tokens(mean, lengths, logs.numel())
        return PolicyTerms(-ratio * advantages, ratio.detach(), bounded != logs)
