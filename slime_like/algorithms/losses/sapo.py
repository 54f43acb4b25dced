"""Soft adaptive policy optimization."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from slime_like.algorithms.losses.policy import RatioLoss, require_option, required, token_ratio
from slime_like.algorithms.losses.types import LossInputs, PolicyTerms


@dataclass(frozen=True)
class SAPO(RatioLoss):
    """Soft adaptive policy optimization (arXiv:2511.20347): a sigmoid gate instead of a clip.

    ``-4 / tau * sigmoid(tau (r - 1)) A``. At r = 1 the gradient is REINFORCE's, and it fades on both sides. The
    reduction "samples" gives the paper's objective.

    Attributes:
        tau_positive: sharpness of the gate for positive advantages.
        tau_negative: sharpness for all others; higher, because raising many unsampled tokens is less stable.
    """

    tau_positive: float = 1.0
    tau_negative: float = 1.05

    name: ClassVar[str] = "sapo"

    def __post_init__(self) -> None:
        require_option("tau_positive", self.tau_positive, 0, above=True)
        require_option("tau_negative", self.tau_negative, 0, above=True)

    def __call__(self, inputs: LossInputs) -> PolicyTerms:
        ratio, advantages = token_ratio(inputs), required(inputs, "advantages")
        positive, negative = (advantages.new_tensor(tau) for tau in (self.tau_positive, self.tau_negative))
        tau = torch.where(advantages > 0, positive, negative)
        gate = 4 / tau * torch.sigmoid(tau * (ratio - 1))
        return PolicyTerms(-gate * advantages, ratio.detach())
