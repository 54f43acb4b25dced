"""Small decision trees, every response of which is enumerated."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

ACTIONS = 3
"""Tokens of the policy's vocabulary. 0 ends a response."""
_STOP = 0
OBSERVATION = -1
"""State of a token that the environment wrote."""


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
    """All responses to one prompt. ``states``: number of states in which the policy chooses."""

    name: str
    responses: tuple[Response, ...]
    states: int

    def likeliest(self, logits: Tensor) -> int:
        best = logits.argmax(dim=-1).tolist()
        chosen = ([best[s] == t for s, t in zip(r.states, r.tokens, strict=True) if s >= 0] for r in self.responses)
        return next(index for index, each in enumerate(chosen) if all(each))

    def logprobs(self, logits: Tensor, response: Response) -> Tensor:
        """Return (n,) log-softmax of the (states, ACTIONS) ``logits`` at a response's tokens, 0 at observations."""
        states, tokens = torch.tensor(response.states), torch.tensor(response.tokens)
        chosen = logits.log_softmax(dim=-1)[states.clamp_min(0), tokens]
        return torch.where(states >= 0, chosen, 0.0)


def one_turn(small: bool) -> Tree:
    return Tree("one turn", tuple(_responses(small, lambda a: 0)), ACTIONS)


def two_turns(small: bool) -> Tree:
    """Return the tree of conversations: stop at once, or see an observation of one or two tokens and act again."""
    return Tree("two turns", tuple(_responses(small, lambda a: a)), ACTIONS)


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
