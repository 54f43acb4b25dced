"""Small decision trees, every response of which is enumerated."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

ACTIONS = 3
"""Tokens of the policy's vocabulary. 0 ends a response."""
_STOP = 0
_OBSERVED = ACTIONS
"""State whose logits give an observation a logprob, with a gradient that no objective has."""


@dataclass(frozen=True, slots=True)
class Response:
    """One response: the state in which each token was chosen, the tokens, and False where the environment wrote it."""

    states: tuple[int, ...]
    tokens: tuple[int, ...]
    mask: tuple[bool, ...]


@dataclass(frozen=True, slots=True)
class Tree:
    """All responses to one prompt. ``states``: number of states, with the one of observations."""

    name: str
    responses: tuple[Response, ...]
    states: int = ACTIONS + 1

    def likeliest(self, logits: Tensor) -> int:
        best = logits.argmax(dim=-1).tolist()
        chosen = (
            all(best[s] == t for s, t, m in zip(r.states, r.tokens, r.mask, strict=True) if m) for r in self.responses
        )
        return next(index for index, each in enumerate(chosen) if each)

    def logprobs(self, logits: Tensor, response: Response) -> Tensor:
        """Return (n,) log-softmax of the (states, ACTIONS) ``logits`` at a response's tokens."""
        return logits.log_softmax(dim=-1)[torch.tensor(response.states), torch.tensor(response.tokens)]

    def logprob(self, logits: Tensor, response: Response) -> Tensor:
        """Return the sum of the logprobs of the tokens that the policy chose."""
        return self.logprobs(logits, response)[torch.tensor(response.mask)].sum()


def one_turn(small: bool) -> Tree:
    return Tree("one turn", tuple(_responses(small, lambda a: 0)))


def two_turns(small: bool) -> Tree:
    """Return the tree of conversations: stop immediately, or see an observation of one or two tokens and act again."""
    return Tree("two turns", tuple(_responses(small, lambda a: a)))


def one_token() -> Tree:
    """Return the tree of single tokens, each of which is followed by as many observed ones."""
    return Tree("one token", tuple(_response((a,), a, ()) for a in range(ACTIONS)))


def _responses(small: bool, observed: Callable[[int], int]) -> Iterator[Response]:
    """Yield all responses. After a first token other than 0, or in a small tree after 1 only, a second one follows.

    Args:
        observed: number of observation tokens after a first token.
    """
    for a in range(ACTIONS):
        if a == _STOP or (small and a > 1):
            yield _response((a,), 0, ())
            continue
        for b in range(ACTIONS):
            yield _response((a,), observed(a), (b,))


def _response(first: tuple[int, ...], seen: int, second: tuple[int, ...]) -> Response:
    states = (0, *(_OBSERVED,) * seen, *first * len(second))
    return Response(states, (*first, *(_STOP,) * seen, *second), tuple(state != _OBSERVED for state in states))
