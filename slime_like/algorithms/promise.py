"""What the documents of a part of the objective say about its expected gradient."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeVar

Target = Literal["reward", "best reward", "likelihood", "KL", "forward KL", "KL of responses", "entropy"]

_Part = TypeVar("_Part", bound=Callable[..., object])


@dataclass(frozen=True, slots=True)
class Promise:
    """A multiple of a true gradient, on samples of the current policy. ``slime-like verify objective`` checks it.

    It is a part's attribute ``promise``, in custom code too. As a decorator, it sets that of a function.

    Attributes:
        of: whose gradient it is: of the expected "reward", the "best reward" of a group, or the samples' "likelihood";
            at visited states, of the "KL" to the reference, the "forward KL" from it, or the "entropy". ``None``:
            nobody's; the part is biased by design.
        scale: the multiple, for groups of this many samples.
        exact: for any responses and rewards. If false, for responses of one token, in pairs, with two rewards 1 apart.
        follows: for a loss, also to first order of an update after the samples, for responses of one token.
        weighted, rewarded: for a KL estimator, ``of`` if pi / pi_old weighs it, and as a part of rewards.
    """

    of: Target | None = "reward"
    scale: Callable[[int], float] = lambda samples: 1.0
    exact: bool = True
    follows: bool = False
    weighted: Target | None = None
    rewarded: Target | None = None

    def __call__(self, part: _Part) -> _Part:
        vars(part)["promise"] = self
        return part


def promise_of(part: object) -> Promise:
    """Return what a part promises, which is nothing if it declares nothing."""
    return getattr(part, "promise", NOTHING)


NOTHING = Promise(None)
CENTRED = Promise(scale=lambda samples: 1 - 1 / samples)
"""Promise of a baseline that includes the sample itself."""
CENTRED_PAIRS = Promise(scale=CENTRED.scale, exact=False)
NORMALIZED_PAIRS = Promise(scale=lambda samples: 0.5**0.5, exact=False)
"""Two rewards 1 apart have the sample standard deviation sqrt(1/2), by which their difference is divided."""
