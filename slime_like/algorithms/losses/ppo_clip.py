"""PPO's clipped surrogate."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from slime_like.algorithms.losses.policy import RatioLoss, require_option, required, token_ratio
from slime_like.algorithms.losses.types import LossInputs, PolicyTerms


@dataclass(frozen=True)
class PPOClip(RatioLoss):
    """Clipped surrogate (PPO, arXiv:1707.06347 eq. 7), with two separate bounds (DAPO, arXiv:2503.14476 eq. 8).

    ``-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)``; with ``dual_clip = c`` and A < 0,
    at most ``-c A`` (arXiv:1912.09729 eq. 5).

    Attributes:
        clip_low: ratios below 1 - clip_low are clipped.
        clip_high: ratios above 1 + clip_high are clipped.
        dual_clip: bound c for negative advantages; none: off.
    """

    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None

    name: ClassVar[str] = "ppo_clip"

    def __post_init__(self) -> None:
        require_option("clip_low", self.clip_low, 0, 1)
        require_option("clip_high", self.clip_high, 0)
        require_option("dual_clip", self.dual_clip, 1, above=True)

    def ratio(self, inputs: LossInputs) -> Tensor:
        return token_ratio(inputs)

    def __call__(self, inputs: LossInputs) -> PolicyTerms:
        ratio, advantages = self.ratio(inputs), required(inputs, "advantages")
        plain, bounded = -ratio * advantages, -ratio.clamp(1 - self.clip_low, 1 + self.clip_high) * advantages
        loss, clipped = torch.maximum(plain, bounded), bounded > plain
        if self.dual_clip is not None:
            ceiling = -self.dual_clip * advantages
            over = (advantages < 0) & (loss > ceiling)
            loss, clipped = torch.where(over, ceiling, loss), clipped | over
        return PolicyTerms(loss, ratio.detach(), clipped)
