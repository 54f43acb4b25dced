"""Clipped importance weights."""

from dataclasses import dataclass
from typing import ClassVar

from slime_like.algorithms.losses.policy import RatioLoss, require_option, required, token_ratio
from slime_like.algorithms.losses.types import LossInputs, PolicyTerms


@dataclass(frozen=True)
class CISPO(RatioLoss):
    """Clipped importance weights (MiniMax-M1, arXiv:2506.13585 eq. 4 and 5): ``-sg(clip(r)) A log pi``.

    Clips the weight but not the gradient, so every token keeps one.

    Attributes:
        clip_low: weights below 1 - clip_low are clipped; 1 removes the bound, as in the paper.
        clip_high: weights above 1 + clip_high are clipped.
    """

    clip_low: float = 0.2
    clip_high: float = 0.2

    name: ClassVar[str] = "cispo"

    def __post_init__(self) -> None:
        require_option("clip_low", self.clip_low, 0, 1)
        require_option("clip_high", self.clip_high, 0)

    def __call__(self, inputs: LossInputs) -> PolicyTerms:
        ratio = token_ratio(inputs).detach()
        weight = ratio.clamp(1 - self.clip_low, 1 + self.clip_high)
        per_token = -weight * required(inputs, "advantages") * inputs.logprobs
        return PolicyTerms(per_token, ratio, weight != ratio)
