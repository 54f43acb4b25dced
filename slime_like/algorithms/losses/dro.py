"""Direct reward optimization."""

from dataclasses import dataclass
from typing import ClassVar

from slime_like.algorithms.bounds import bounded_exp, log_ratio
from slime_like.algorithms.losses.policy import RatioLoss, require_option, required
from slime_like.algorithms.losses.types import LossInputs, PolicyTerms
from slime_like.algorithms.promise import Promise


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
