"""Causal attention inside every sequence of a pack: the base of all ways to share it among context ranks."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from backends.common.attention.kernels import Pairing, Saved, Segments, kernel_for


class PackedAttention(ABC):
    """Boundaries of one micro-batch's sequences, and how ranks compute attention inside them."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """Map the local tokens' (T, H, D) queries, (T, G, D) keys and values to (T, H, D) outputs; differentiable."""
        return _Attend.apply(q, k, v, self, scale)

    @abstractmethod
    def forward(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, ...]:
        """Return the output in the type of q, its log-sum-exp, and whatever else ``backward`` needs."""

    @abstractmethod
    def backward(
        self, grad: Tensor, saved: Saved, scale: float, more: Sequence[Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of q, k and v. ``more`` holds the rest of what ``forward`` returned."""


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, attention: PackedAttention, scale: float) -> Tensor:
        out, *others = attention.forward(q, k, v, scale)
        ctx.save_for_backward(q, k, v, out, *others)
        ctx.setting = (attention, scale)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        attention, scale = ctx.setting
        q, k, v, out, lse, *more = ctx.saved_tensors
        return *attention.backward(grads[0].contiguous(), Saved(q, k, v, out, lse), scale, more), None, None


@dataclass(frozen=True, slots=True)
class LocalAttention(PackedAttention):
    """Attention of whole sequences on one rank."""

    segments: Segments

    def forward(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, ...]:
        return kernel_for(q.device.type).forward(q, k, v, Pairing(self.segments, self.segments, True, scale))

    def backward(
        self, grad: Tensor, saved: Saved, scale: float, more: Sequence[Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        pairing = Pairing(self.segments, self.segments, True, scale)
        return kernel_for(grad.device.type).backward(grad, saved, pairing)
