"""REINFORCE."""

from dataclasses import dataclass
from typing import ClassVar

from slime_like.algorithms.losses.policy import RatioLoss, required
from slime_like.algorithms.losses.types import LossInputs, PolicyTerms
from slime_like.algorithms.promise import Promise


@dataclass(frozen=True)
class PolicyGradient(RatioLoss):
    """REINFORCE (Williams 1992): ``-A log pi``, exact on samples of the current policy."""

    name: ClassVar[str] = "policy_gradient"
    promise: ClassVar[Promise] = Promise()
    needs_old: ClassVar[bool] = False

    def __call__(self, inputs: LossInputs) -> PolicyTerms:
        return PolicyTerms(-required(inputs, "advantages") * inputs.logprobs)
