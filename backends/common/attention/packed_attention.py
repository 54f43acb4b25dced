"""Causal attention inside every sequence of a pack: the base of all ways to share it among context ranks."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from backends.common.attention.kernels import Pairing, Saved, Segments, kernel_for
from slime_like.errors import TrainerError


class PackedAttention(ABC):
    """Boundaries of one micro-batch's sequences, and how ranks compute attention inside them."""

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale: float,
        sinks: Tensor | None = None,
        window: int | None = None,
    ) -> Tensor:
        """Map the local tokens' (T, H, D) queries, (T, G, D) keys and values to (T, H, D) outputs; differentiable.

        Args:
            sinks: (H,) logits of one more key per head, which has no value (arXiv:2508.10925).
            window: keys that a query sees at most, its own included. Pass ``None`` if no sequence is longer.

        Raises:
            TrainerError: this attention supports no windows, or no sinks.
        """
        return _Attend.apply(q, k, v, sinks, self, scale, window)

    @abstractmethod
    def forward(self, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None) -> tuple[Tensor, ...]:
        """Return the output in the type of q, its log-sum-exp, and whatever else ``backward`` needs."""

    @abstractmethod
    def backward(
        self, grad: Tensor, saved: Saved, scale: float, window: int | None, more: Sequence[Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of q, k and v. ``more`` holds the rest of what ``forward`` returned."""


def no_windows(attention: str) -> TrainerError:
    """Return the error of ``attention`` that does not support windows."""
    return TrainerError(
        f"a sequence is longer than a layer's sliding window, which {attention} does not support",
        code="windows-not-supported",
        remedy="set trainer.attention=auto and trainer.share_prefixes=false, or train on shorter sequences",
    )


class _Attend(torch.autograd.Function):
    """Attention with sinks. A sink only enlarges the softmax's denominator, so it scales the kernels' results.

    Given the scaled output and the enlarged log-sum-exp, the kernels' backward passes return the gradients of q, k
    and v with the sink in the softmax.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        attention: PackedAttention,
        scale: float,
        window: int | None,
    ) -> Tensor:
        out, lse, *others = attention.forward(q, k, v, scale, window)
        if sinks is not None:
            total = torch.logaddexp(lse, sinks.to(lse.dtype)[:, None])
            out, lse = (out * (lse - total).exp().t()[..., None]).to(out.dtype), total
        ctx.save_for_backward(q, k, v, sinks, out, lse, *others)
        ctx.setting = (attention, scale, window)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (attention, scale, window), grad = ctx.setting, grads[0].contiguous()
        q, k, v, sinks, out, lse, *more = ctx.saved_tensors
        parts = attention.backward(grad, Saved(q, k, v, out, lse), scale, window, more)
        return *parts, None if sinks is None else _sink_gradient(grad, sinks, out, lse), None, None, None


def _sink_gradient(grad: Tensor, sinks: Tensor, out: Tensor, lse: Tensor) -> Tensor:
    """Return minus the sum over tokens of the sink's share of the softmax times ``grad . out``, per head."""
    shares = (sinks.to(lse.dtype)[:, None] - lse).exp()
    return -torch.einsum("ht,thd,thd->h", shares, grad.to(lse.dtype), out.to(lse.dtype)).to(sinks.dtype)


@dataclass(frozen=True, slots=True)
class LocalAttention(PackedAttention):
    """Attention of whole sequences on one rank."""

    segments: Segments

    def forward(self, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None) -> tuple[Tensor, ...]:
        return kernel_for(q.device.type).forward(q, k, v, Pairing(self.segments, self.segments, True, scale, window))

    def backward(
        self, grad: Tensor, saved: Saved, scale: float, window: int | None, more: Sequence[Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        pairing = Pairing(self.segments, self.segments, True, scale, window)
        return kernel_for(grad.device.type).backward(grad, saved, pairing)
