"""The policy terms, one class each. Ratios come from recorded logprobs, never from a detached copy."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from slime_like.algorithms.bounds import bounded_exp, log_ratio
from slime_like.algorithms.losses.types import LossInputs, PolicyTerms
from slime_like.algorithms.segments import masked_segment_mean, spread_over_tokens

if TYPE_CHECKING:
    from slime_like.config.algorithm import AlgorithmConfig  # needs pydantic, which this layer doesn't


class PolicyLoss(Protocol):
    """A policy term: built from the configuration, called with the inputs of a micro-batch.

    ``needs_old`` and ``needs_advantages`` declare that the term needs ``old_logprobs`` and ``advantages``. An optional
    ``per_sequence = False`` declares that no token's value depends on other tokens. Rollouts of several rows need it.
    """

    name: str
    needs_old: bool
    needs_advantages: bool

    def __init__(self, config: AlgorithmConfig) -> None: ...

    def __call__(self, inputs: LossInputs) -> PolicyTerms: ...


class PPOClip:
    """Clipped surrogate (PPO, arXiv:1707.06347 eq. 7), with two separate bounds (DAPO, arXiv:2503.14476 eq. 8).

    ``-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)``; with ``dual_clip = c`` and A < 0,
    at most ``-c A`` (arXiv:1912.09729 eq. 5).
    """

    name = "ppo_clip"
    needs_old = True
    needs_advantages = True

    def __init__(self, config: AlgorithmConfig) -> None:
        self.low, self.high, self.dual = 1 - config.clip_low, 1 + config.clip_high, config.dual_clip

    def ratio(self, inputs: LossInputs) -> Tensor:
        return token_ratio(inputs)

    def __call__(self, inputs: LossInputs) -> PolicyTerms:
        ratio, advantages = self.ratio(inputs), required(inputs, "advantages")
        plain, bounded = -ratio * advantages, -ratio.clamp(self.low, self.high) * advantages
        loss, clipped = torch.maximum(plain, bounded), bounded > plain
        if self.dual is not None:
            ceiling = -self.dual * advantages
            over = (advantages < 0) & (loss > ceiling)
            loss, clipped = torch.where(over, ceiling, loss), clipped | over
        return PolicyTerms(loss, ratio.detach(), clipped)


class GSPO(PPOClip):
    """Group sequence policy optimization (arXiv:2507.18071 eq. 5 to 7): one ratio per sequence.

    ``s = exp(mean over loss-carrying tokens of (log pi - log pi_old))``, clipped as in PPO. Every token of a sequence
    carries the sequence's loss, so the reduction "samples" gives the paper's objective. Clip bounds are far smaller
    than PPO's (3e-4 and 4e-4 in the paper).
    """

    name = "gspo"

    def ratio(self, inputs: LossInputs) -> Tensor:
        lengths = required(inputs, "response_lens")
        log_ratios = log_ratio(inputs.logprobs, required(inputs, "old_logprobs"))
        per_sequence = masked_segment_mean(log_ratios, inputs.loss_mask, lengths)
        return spread_over_tokens(bounded_exp(per_sequence), lengths, inputs.logprobs.numel())


class CISPO(PPOClip):
    """Clipped importance weights (MiniMax-M1, arXiv:2506.13585 eq. 4 and 5): ``-sg(clip(r)) A log pi``.

    Clips the weight but not the gradient, so every token keeps one. ``clip_low = 1`` removes the lower bound, as in
    the paper.
    """

    name = "cispo"

    def __call__(self, inputs: LossInputs) -> PolicyTerms:
        ratio = token_ratio(inputs).detach()
        weight = ratio.clamp(self.low, self.high)
        per_token = -weight * required(inputs, "advantages") * inputs.logprobs
        return PolicyTerms(per_token, ratio, weight != ratio)


class SFT:
    """Supervised fine-tuning: the negative log-likelihood, ``-log pi`` (InstructGPT, arXiv:2203.02155, section 3.1)."""

    name = "sft"
    needs_old = False
    needs_advantages = False

    def __init__(self, config: AlgorithmConfig) -> None:
        pass

    def __call__(self, inputs: LossInputs) -> PolicyTerms:
        return PolicyTerms(-inputs.logprobs)


class PolicyGradient(SFT):
    """REINFORCE (Williams 1992): ``-A log pi``, exact on samples of the current policy."""

    name = "policy_gradient"
    needs_advantages = True

    def __call__(self, inputs: LossInputs) -> PolicyTerms:
        return PolicyTerms(-required(inputs, "advantages") * inputs.logprobs)


POLICY_LOSSES = MappingProxyType({cls.name: cls for cls in (PPOClip, PolicyGradient, GSPO, CISPO, SFT)})
"""Policy terms by name. Add the name of a new one to ``LOSSES`` in ``slime_like/config/algorithm.py`` too."""

_GIVEN = {
    "response_lens": "the (S,) lengths of its sequences, `PackedTrajectory.response_lens`",
    "old_logprobs": "the (R,) logprobs under the weights at the start of the step",
}


def required(inputs: LossInputs, name: str) -> Tensor:
    """Return an input that the loss needs; raise ``ValueError`` if it is missing."""
    value: Tensor | None = getattr(inputs, name)
    if value is None:
        raise ValueError(f"this loss needs {name}, but the micro-batch has none; give {_GIVEN.get(name, 'shape (R,)')}")
    return value


def token_ratio(inputs: LossInputs) -> Tensor:
    """Return (R,) pi_current / pi_old, with graph, between exp(-20) and exp(20) (``bounds.py``)."""
    return bounded_exp(log_ratio(inputs.logprobs, required(inputs, "old_logprobs")))
