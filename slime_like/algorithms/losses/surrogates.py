"""Surrogate objectives, plain ones and ones that clip a ratio or weight, per token or (GSPO, GMPO) per sequence."""

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
from slime_like.algorithms.promise import Promise
from slime_like.algorithms.segments import masked_segment_mean, spread_over_tokens


@dataclass(frozen=True)
class PolicyGradient(RatioLoss):
    """REINFORCE (Williams 1992): ``-A log pi``, exact on samples of the current policy."""

    name: ClassVar[str] = "policy_gradient"
    promise: ClassVar[Promise] = Promise()
    needs_old: ClassVar[bool] = False

    def __call__(self, inputs: LossInputs) -> PolicyTerms:
        return PolicyTerms(-required(inputs, "advantages") * inputs.logprobs)


@dataclass(frozen=True)
class SFT:
    """Supervised fine-tuning: the negative log-likelihood, ``-log pi`` (InstructGPT, arXiv:2203.02155, section 3.1)."""

    name: ClassVar[str] = "sft"
    promise: ClassVar[Promise] = Promise("likelihood")
    needs_old: ClassVar[bool] = False
    needs_advantages: ClassVar[bool] = False
    per_sequence: ClassVar[bool] = False

    def __call__(self, inputs: LossInputs) -> PolicyTerms:
        return PolicyTerms(-inputs.logprobs)


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


@dataclass(frozen=True)
class GSPO(PPOClip):
    """Group sequence policy optimization (arXiv:2507.18071 eq. 5 to 7): one ratio per sequence.

    ``s = exp(mean over loss-carrying tokens of (log pi - log pi_old))``, clipped as in PPO. Every token of a sequence
    carries the sequence's loss, so the reduction "samples" gives the paper's objective.

    Attributes:
        clip_low: as in PPO; the default is the paper's, because a sequence's ratio varies far less than a token's.
        clip_high: as in PPO.
        dual_clip: as in PPO.
    """

    clip_low: float = 3e-4
    clip_high: float = 4e-4

    name: ClassVar[str] = "gspo"
    per_sequence: ClassVar[bool] = True

    def ratio(self, inputs: LossInputs) -> Tensor:
        lengths = required(inputs, "response_lens")
        log_ratios = log_ratio(inputs.logprobs, required(inputs, "old_logprobs"))
        per_sequence = masked_segment_mean(log_ratios, inputs.loss_mask, lengths)
        return spread_over_tokens(bounded_exp(per_sequence), lengths, inputs.logprobs.numel())


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
