"""Supervised fine-tuning."""

from dataclasses import dataclass
from typing import ClassVar

from slime_like.algorithms.losses.types import LossInputs, PolicyTerms
from slime_like.algorithms.promise import Promise


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
