"""The interface of policy terms, and what several of them use."""

import math
from typing import ClassVar, Protocol

from torch import Tensor

from slime_like.algorithms.bounds import bounded_exp, log_ratio
from slime_like.algorithms.losses.types import LossInputs, PolicyTerms
from slime_like.algorithms.promise import Promise


class PolicyLoss(Protocol):
    """A policy term: built with its options, called with the inputs of a micro-batch.

    Ratios come from recorded logprobs, never from a detached copy.

    Attributes:
        name: its name in the configuration and in metrics.
        needs_old, needs_advantages: the term needs ``old_logprobs`` and ``advantages``.
        per_sequence: a token's value may depend on other tokens of its sequence. Rollouts of several rows, which are
            trained row by row, need ``False``; a class without the attribute counts as ``True``.
    """

    name: ClassVar[str]
    needs_old: ClassVar[bool]
    needs_advantages: ClassVar[bool]
    per_sequence: ClassVar[bool]

    def __call__(self, inputs: LossInputs) -> PolicyTerms: ...


class RatioLoss(PolicyLoss, Protocol):
    """A policy term of each token's advantage and ratio to the old policy."""

    needs_old: ClassVar[bool] = True
    needs_advantages: ClassVar[bool] = True
    per_sequence: ClassVar[bool] = False
    promise: ClassVar[Promise] = Promise(follows=True)


def required(inputs: LossInputs, name: str) -> Tensor:
    """Return an input that the loss needs; raise ``ValueError`` if it is missing."""
    value: Tensor | None = getattr(inputs, name)
    if value is None:
        raise ValueError(f"this loss needs {name}, but the micro-batch has none; see LossInputs.{name}")
    return value


def token_ratio(inputs: LossInputs) -> Tensor:
    """Return (R,) pi_current / pi_old, with graph, between exp(-20) and exp(20) (``bounds.py``)."""
    return bounded_exp(log_ratio(inputs.logprobs, required(inputs, "old_logprobs")))


def require_option(name: str, value: float | None, low: float, high: float = math.inf, above: bool = False) -> None:
    """Raise ``ValueError`` unless an option is ``None`` or within its bounds; ``above``: more than ``low``."""
    if value is not None and not (low < value <= high or (value == low and not above)):
        least, most = f"{'above' if above else 'at least'} {low:g}", f" and at most {high:g}" if high < math.inf else ""
        raise ValueError(f"{name}={value:g} must be {least}{most}; correct it")
