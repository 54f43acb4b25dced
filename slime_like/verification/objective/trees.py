"""Small decision trees, every response of which is enumerated."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torch import Tensor

ACTIONS = 3
"""Tokens of the policy's vocabulary. 0 ends a response."""
_STOP = 0
OBSERVATION = ACTIONS
"""State of a token that the environment wrote. It has logits, so a loss on such a token has a gradient."""


@dataclass(frozen=True, slots=True)
class Response:
    """One response: the state in which each token was chosen, ``OBSERVATION`` for others, and the tokens."""

    states: tuple[int, ...]
    tokens: tuple[int, ...]

    @property
    def mask(self) -> list[bool]:
        """True where the policy chose the token."""
        return [state != OBSERVATION for state in self.states]


@dataclass(frozen=True, slots=True)
class Tree:
    """All responses to one prompt."""

    name: str
    responses: tuple[Response, ...]

    def likeliest(self, logits: Tensor) -> int:
        best = logits.argmax(dim=-1).tolist()
        pairs = [zip(each.states, each.tokens, strict=True) for each in self.responses]
        return next(i for i, each in enumerate(pairs) if all(best[s] == t for s, t in each if s != OBSERVATION))

    def logprobs(self, logits: Tensor, response: Response) -> Tensor:
        """Return (P, n) log-softmax of the (P, ACTIONS + 1, ACTIONS) ``logits`` at a response's tokens."""
        return logits.log_softmax(dim=-1)[:, response.states, response.tokens]


def one_turn(small: bool) -> Tree:
    return Tree("one turn", tuple(_responses(small, lambda a: 0)))


def two_turns(small: bool) -> Tree:
    """Return the tree of conversations: stop at once, or see an observation of one or two tokens and act again."""
    return Tree("two turns", tuple(_responses(small, lambda a: a)))


def one_token() -> Tree:
    """Return the tree of single tokens, each with as many observed ones after it."""
    return Tree("one token", tuple(Response((0, *(OBSERVATION,) * a), (a, *(_STOP,) * a)) for a in range(ACTIONS)))


def _responses(small: bool, observed: Callable[[int], int]) -> Iterator[Response]:
    """Yield all responses. After a first token other than 0, or in a small tree after 1 only, a second one follows.

    Args:
        observed: number of observation tokens after a first token.
    """
    for a in range(ACTIONS):
        if a == _STOP or (small and a > 1):
            yield Response((0,), (a,))
            continue
        for b in range(ACTIONS):
            seen = observed(a)
            yield Response((0, *(OBSERVATION,) * seen, a), (a, *(_STOP,) * seen, b))
