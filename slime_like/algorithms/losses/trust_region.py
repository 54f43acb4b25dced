"""Policy terms that restrain the tokens that leave the old policy: DPPO, Clip-Cov and KL-Cov, DRO."""

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from slime_like.algorithms.importance import bounded_exp, log_ratio
from slime_like.algorithms.losses.policy import (
    LossInputs,
    PolicyTerms,
    RatioLoss,
    require_option,
    required,
    token_ratio,
)
from slime_like.algorithms.losses.surrogates import PPOClip
from slime_like.algorithms.promise import Promise


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


def _covariances(logprobs: Tensor, advantages: Tensor) -> Tensor:
    """Return each token's share in the covariance of log pi and advantage, ``(log pi - mean) (A - mean)``.

    The entropy falls by about this covariance (arXiv:2505.22617). The shares are over all tokens of the optimizer step,
    under the policy at the start of the training step. (verl 0.9.1 chooses tokens within each micro-batch, which
    depends on the packing.)
    """
    logs, gains = logprobs.double(), advantages.double()
    return (logs - logs.mean()) * (gains - gains.mean())


@dataclass(frozen=True)
class ClipCov(PPOClip):
    """Clip-Cov (arXiv:2505.22617, section 4.2): a few tokens of high covariance, drawn at random, have no gradient.

    Attributes:
        clip_low: as in PPO.
        clip_high: as in PPO.
        dual_clip: as in PPO.
        share: tokens to draw, as a fraction of the step's.
        least: lowest covariance of a token that may be drawn.
        most: highest covariance of a token that may be drawn.
    """

    share: float = 2e-4
    least: float = 1.0
    most: float = 5.0

    name: ClassVar[str] = "clip_cov"

    def __post_init__(self) -> None:
        super().__post_init__()
        require_option("share", self.share, 0, 1, above=True)

    def choose_tokens(self, logprobs: Tensor, advantages: Tensor, generator: torch.Generator) -> Tensor:
        """Return (n,) bool, True for the tokens drawn among an optimizer step's n loss-carrying tokens."""
        covariances = _covariances(logprobs, advantages)
        (candidates,) = ((covariances > self.least) & (covariances < self.most)).nonzero(as_tuple=True)
        count = min(max(1, int(self.share * len(covariances))), len(candidates))
        drawn = candidates[torch.randperm(len(candidates), generator=generator)[:count]]
        return torch.zeros(len(covariances), dtype=torch.bool).index_fill(0, drawn, True)

    def __call__(self, inputs: LossInputs) -> PolicyTerms:
        terms, apart = super().__call__(inputs), required(inputs, "chosen_tokens")
        assert terms.clipped is not None
        return PolicyTerms(terms.per_token.masked_fill(apart, 0.0), terms.ratio, terms.clipped | apart)


@dataclass(frozen=True)
class KLCov(RatioLoss):
    """KL-Cov (arXiv:2505.22617, section 4.2): a penalty for tokens of highest covariance that leave the old policy.

    ``-r A`` for all others, without a clip; for these ``-r A + coef (r - 1 - log r)``: k3 of KL(pi_old || pi), whose
    gradient vanishes at r = 1. (The published code has ``|log r|``, whose gradient does not.)

    Attributes:
        share: the tokens, as a fraction of the step's.
        coef: coefficient of their KL.
    """

    share: float = 2e-4
    coef: float = 1.0

    name: ClassVar[str] = "kl_cov"

    def __post_init__(self) -> None:
        require_option("share", self.share, 0, 1, above=True)
        require_option("coef", self.coef, 0)

    def choose_tokens(self, logprobs: Tensor, advantages: Tensor, generator: torch.Generator) -> Tensor:
        """Return (n,) bool, True for the loss-carrying tokens of highest covariance in an optimizer step."""
        covariances = _covariances(logprobs, advantages)
        highest = covariances.topk(max(1, int(self.share * len(covariances)))).indices
        return torch.zeros(len(covariances), dtype=torch.bool).index_fill(0, highest, True)

    def __call__(self, inputs: LossInputs) -> PolicyTerms:
        advantages, apart = required(inputs, "advantages"), required(inputs, "chosen_tokens")
        logs = log_ratio(inputs.logprobs, required(inputs, "old_logprobs"))
        ratio = bounded_exp(logs)
        kl = (ratio - 1 - logs).masked_fill(~apart, 0.0)
        return PolicyTerms(-ratio * advantages + self.coef * kl, ratio.detach())


@dataclass(frozen=True)
class DRO(RatioLoss):
    """Direct reward optimization (arXiv:2405.19107), with the advantage instead of the reward minus its baseline.

    ``-A log pi + beta / 2 (log pi - log pi_old)^2`` per token. The paper's squared log ratio is of whole sequences and
    to the reference; per token and to the old policy, as others use it with group advantages, it bounds the step.

    Attributes:
        beta: coefficient of the squared log ratio.
    """

    beta: float = 0.1

    name: ClassVar[str] = "dro"
    promise: ClassVar[Promise] = Promise()

    def __post_init__(self) -> None:
        require_option("beta", self.beta, 0, above=True)

    def __call__(self, inputs: LossInputs) -> PolicyTerms:
        moved = log_ratio(inputs.logprobs, required(inputs, "old_logprobs"))
        gain = required(inputs, "advantages") * inputs.logprobs
        return PolicyTerms(0.5 * self.beta * moved.square() - gain, bounded_exp(moved.detach()))
