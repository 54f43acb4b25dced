"""Causal attention inside every sequence of a pack: the base of all ways to share it among context ranks."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from backends.common.attention.kernels import Pairing, Saved, Segments, kernel_for
from slime_like.errors import TrainerError


class Scores(NamedTuple):
    """A layer's kind of attention.

    Attributes:
        scale: factor of the products of queries and keys.
        window: most keys that a query sees, including its own; ``None``: all earlier keys.
    """

    scale: float
    window: int | None = None

    def within(self, longest: int) -> int | None:
        """Return the window if a sequence of ``longest`` tokens has more keys than it."""
        return self.window if self.window is not None and self.window < longest else None


class PackedAttention(ABC):
    """Boundaries of one micro-batch's sequences, and how ranks compute attention inside them."""

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None = None, sinks: Tensor | None = None
    ) -> Tensor:
        """Map the local tokens' (T, H, D) queries, (T, G, D) keys and values to (T, H, D) outputs; differentiable.

        Args:
            window: most keys that a query sees, including its own.
            sinks: (H,) scores that are part of a head's softmax without having a value (gpt-oss, arXiv:2508.10925).
        """
        return _Attend.apply(q, k, v, sinks, self, Scores(scale, window))

    @abstractmethod
    def forward(self, q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> tuple[Tensor, ...]:
        """Return the output in the type of q, its log-sum-exp, and whatever else ``backward`` needs."""

    @abstractmethod
    def backward(
        self, grad: Tensor, saved: Saved, scores: Scores, more: Sequence[Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of q, k and v. ``more`` holds the rest of what ``forward`` returned."""


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, attention: PackedAttention, scores: Scores
    ) -> Tensor:
        out, lse, *others = attention.forward(q, k, v, scores)
        if sinks is not None:
            total = torch.logaddexp(lse, sinks.to(lse.dtype)[:, None])
            out = (out * (lse - total).exp().t()[..., None]).to(q.dtype)
            lse = total
        ctx.save_for_backward(q, k, v, sinks, out, lse, *others)
        ctx.setting = (attention, scores)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        attention, scores = ctx.setting
        q, k, v, sinks, out, lse, *more = ctx.saved_tensors
        grad = grads[0].contiguous()
        # A kernel's probabilities are exp(score - lse), and its sums are of grad * out: a sink changes both correctly.
        gradients = attention.backward(grad, Saved(q, k, v, out, lse), scores, more)
        if sinks is None:
            return *gradients, None, None, None
        unseen = torch.linalg.vecdot(grad.to(lse.dtype), out.to(lse.dtype))
        shares = (sinks.to(lse.dtype)[:, None] - lse).exp()
        return *gradients, -(shares * unseen.t()).sum(dim=1).to(sinks.dtype), None, None


def unsupported(attention: str, what: str) -> TrainerError:
    """Return the error for layers that need the all-gather among context ranks."""
    return TrainerError(
        f"{attention} does not support {what} over several context ranks",
        code="attention-not-shared",
        remedy="set trainer.attention=allgather, or trainer.parallel.context=1",
    )


@dataclass(frozen=True, slots=True)
class LocalAttention(PackedAttention):
    """Attention of whole sequences on one rank."""

    segments: Segments

    def forward(self, q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> tuple[Tensor, ...]:
        return kernel_for(q.device.type).forward(q, k, v, self._pairing(scores))

    def backward(
        self, grad: Tensor, saved: Saved, scores: Scores, more: Sequence[Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        return kernel_for(grad.device.type).backward(grad, saved, self._pairing(scores))

    def _pairing(self, scores: Scores) -> Pairing:
        return Pairing(self.segments, self.segments, True, scores.scale, scores.within(self.segments.longest))
