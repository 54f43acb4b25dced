"""What the documents of a part of the objective say about its expected gradient."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeVar

Target = Literal["reward", "best reward", "likelihood", "KL", "forward KL", "KL of responses", "entropy"]

_Function = TypeVar("_Function", bound=Callable[..., object])


@dataclass(frozen=True, slots=True)
class Promise:
    """A multiple of a true gradient, on samples of the current policy. ``slime-like verify objective`` checks it.

    Every part of the objective declares one in its attribute ``promise``, custom code too if it can.

    Attributes:
        of: whose gradient it is: expected "reward", "best reward" of a group, or "likelihood" of the samples; of the
            visited states, "KL" to the reference, "forward KL" from it, or "entropy"; "KL of responses", in a reward.
            ``None``: nobody's, the part is biased by design.
        scale: the multiple, for groups of this many samples.
        exact: for any responses and rewards. If false, for responses of one token, in pairs, with rewards 0 and 1.
        follows: for a loss, also to first order of an update after the samples, for responses of one token.
        weighted: for a KL estimator, what ``of`` becomes if pi / pi_old weighs it; ``None``: nobody's.
    """

    of: Target | None = "reward"
    scale: Callable[[int], float] = lambda samples: 1.0
    exact: bool = True
    follows: bool = False
    weighted: Target | None = None


CENTRED = Promise(scale=lambda samples: 1 - 1 / samples)
"""Of a baseline that includes the sample itself."""
CENTRED_PAIRS = Promise(scale=CENTRED.scale, exact=False)
NORMALIZED_PAIRS = Promise(scale=lambda samples: 0.5**0.5, exact=False)
"""Rewards 0 and 1 have the sample standard deviation sqrt(1/2), by which their difference 1 is divided."""


def promises(promise: Promise) -> Callable[[_Function], _Function]:
    """Return a decorator that declares what a function promises."""

    def declared(function: _Function) -> _Function:
        vars(function)["promise"] = promise
        return function

    return declared
