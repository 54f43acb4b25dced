"""PPO's surrogate with a restraint on the few tokens that lower the entropy most (arXiv:2505.22617).

The entropy falls by about the covariance of log pi and advantage. So the tokens are chosen by their share in it,
``(log pi - mean) (A - mean)``, over all tokens of the optimizer step, under the policy at the start of the training
step. (verl 0.9.1 chooses within each micro-batch, which depends on the packing.)
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from slime_like.algorithms.bounds import bounded_exp, log_ratio
from slime_like.algorithms.losses.policy import RatioLoss, require_option, required
from slime_like.algorithms.losses.ppo_clip import PPOClip
from slime_like.algorithms.losses.types import LossInputs, PolicyTerms


def _covariances(logprobs: Tensor, advantages: Tensor) -> Tensor:
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

    def set_apart(self, logprobs: Tensor, advantages: Tensor, generator: torch.Generator) -> Tensor:
        """Return (n,) bool, True for the tokens drawn among an optimizer step's n loss-carrying tokens."""
        covariances = _covariances(logprobs, advantages)
        (candidates,) = ((covariances > self.least) & (covariances < self.most)).nonzero(as_tuple=True)
        count = min(max(1, int(self.share * len(covariances))), len(candidates))
        drawn = candidates[torch.randperm(len(candidates), generator=generator)[:count]]
        return torch.zeros(len(covariances), dtype=torch.bool).index_fill(0, drawn, True)

    def __call__(self, inputs: LossInputs) -> PolicyTerms:
        terms, apart = super().__call__(inputs), required(inputs, "set_apart")
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

    def set_apart(self, logprobs: Tensor, advantages: Tensor, generator: torch.Generator) -> Tensor:
        """Return (n,) bool, True for the loss-carrying tokens of highest covariance in an optimizer step."""
        covariances = _covariances(logprobs, advantages)
        highest = covariances.topk(max(1, int(self.share * len(covariances)))).indices
        return torch.zeros(len(covariances), dtype=torch.bool).index_fill(0, highest, True)

    def __call__(self, inputs: LossInputs) -> PolicyTerms:
        advantages, apart = required(inputs, "advantages"), required(inputs, "set_apart")
        logs = log_ratio(inputs.logprobs, required(inputs, "old_logprobs"))
        ratio = bounded_exp(logs)
        kl = (ratio - 1 - logs).masked_fill(~apart, 0.0)
        return PolicyTerms(-ratio * advantages + self.coef * kl, ratio.detach())
