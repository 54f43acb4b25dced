"""Divergence proximal policy optimization."""

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from slime_like.algorithms.losses.policy import RatioLoss, require_option, required, token_ratio
from slime_like.algorithms.losses.types import LossInputs, PolicyTerms


@dataclass(frozen=True)
class _DPPO(RatioLoss):
    """``-sg(min(r, ratio_cap)) A log pi``, without the tokens that the divergence excludes (arXiv:2602.04879).

    A token is excluded if it moves away from the old policy (r > 1 with A > 0, or r < 1 with A < 0) and its divergence
    exceeds the bound. The divergences are of two events: this token, or any other.
    """

    low: float
    high: float
    ratio_cap: float = 20.0

    def __post_init__(self) -> None:
        for name in ("low", "high", "ratio_cap"):
            require_option(name, getattr(self, name), 0, above=True)

    @abstractmethod
    def divergence(self, old: Tensor, logprobs: Tensor) -> Tensor:
        """Return (R,) divergences from the old policy to the current one."""

    def __call__(self, inputs: LossInputs) -> PolicyTerms:
        old, advantages = required(inputs, "old_logprobs"), required(inputs, "advantages")
        ratio, current = token_ratio(inputs).detach(), inputs.logprobs.detach()
        divergence, up, down = self.divergence(old, current), advantages > 0, advantages < 0
        far = torch.where(up, divergence > self.high, divergence > self.low)
        excluded = far & ((up & (current > old)) | (down & (current < old)))
        weight = ratio.clamp_max(self.ratio_cap).masked_fill(excluded, 0.0)
        return PolicyTerms(-weight * advantages * inputs.logprobs, ratio, excluded | (ratio > self.ratio_cap))


@dataclass(frozen=True)
class DPPOTV(_DPPO):
    """DPPO with total variation: ``|pi - pi_old|`` of the token (arXiv:2602.04879).

    Attributes:
        low: bound for negative advantages.
        high: bound for positive advantages.
        ratio_cap: largest importance weight.
    """

    low: float = 0.2
    high: float = 0.2

    name: ClassVar[str] = "dppo_tv"

    def divergence(self, old: Tensor, logprobs: Tensor) -> Tensor:
        return (logprobs.exp() - old.exp()).abs()


@dataclass(frozen=True)
class DPPOKL(_DPPO):
    """DPPO with the KL divergence of two events (arXiv:2602.04879).

    ``p log(p / q) + (1 - p) log((1 - p) / (1 - q))`` with the token's probabilities p under the old policy and q under
    the current one.

    Attributes:
        low: bound for negative advantages, in nats.
        high: bound for positive advantages, in nats.
        ratio_cap: largest importance weight.
    """

    low: float = 0.05
    high: float = 0.05

    name: ClassVar[str] = "dppo_kl"

    def divergence(self, old: Tensor, logprobs: Tensor) -> Tensor:
        p, rest, other = old.exp(), -torch.expm1(old), -torch.expm1(logprobs)
        # A certain token has no rest: 0 log 0 = 0. Below the smallest number, the rest's share cannot be resolved.
        tiny = torch.finfo(p.dtype).tiny
        return p * (old - logprobs) + rest * (rest.clamp_min(tiny).log() - other.clamp_min(tiny).log())
