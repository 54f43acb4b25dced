"""Packed attention as an implementation that transformers' models can be told to use."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AttentionInterface

from backends.common.allgather import GatherSegments, allgather_attention
from backends.common.kernels import Segments, kernel_for
from backends.common.packed_attention import packed_attention
from backends.common.ring_flash_attn import Llama3Segments, llama3_attention
from slime_like.errors import TrainerError

NAME = "slime_like_packed"
"""Under which transformers knows it. No mask function is registered for the name, so that no mask is ever made."""

_ONLY_WHEN_EMPTY = ("sliding_window", "softcap", "s_aux", "position_bias")
"""Arguments of other models' attention that would change the result."""


@dataclass(frozen=True, slots=True)
class Boundaries:
    """Where the sequences of one micro-batch begin and end; handed from the model's call down to every layer.

    Exactly one of the first three is set.

    Attributes:
        segments: of the local tokens (one context rank).
        gather: of the local contiguous part (several context ranks).
        llama3: the same as the package ring-flash-attn wants them.
        group: the context ranks.
    """

    segments: Segments | None
    gather: GatherSegments | None
    llama3: Llama3Segments | None
    group: dist.ProcessGroup


def forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    packed: Boundaries | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """What a model's attention layer calls: (1, H, T, D) rotated queries, (1, G, T, D) keys and values.

    Returns:
        (1, T, H, D), and no weights.

    Raises:
        TrainerError: the micro-batch's boundaries did not arrive, or the model asks for another kind of attention.
    """
    if packed is None or attention_mask is not None or query.shape[0] != 1:
        raise TrainerError(
            f"{type(module).__name__}: a pack needs its boundaries and no mask; this model does not hand on what it is "
            "called with, so use trainer.backend=megatron"
        )
    others = [name for name in _ONLY_WHEN_EMPTY if options.get(name) is not None]
    if dropout or others:
        raise TrainerError(
            f"{type(module).__name__} asks for {', '.join(others) or 'dropout'} in attention, which packed attention "
            "does not compute; use a model without"
        )
    # Kernels take tokens first; reading them across heads would cost several times the arithmetic.
    q, k, v = (x[0].transpose(0, 1).contiguous() for x in (query, key, value))
    scale = q.shape[-1] ** -0.5 if scaling is None else scaling
    return _attend(q, k, v, packed, scale)[None], None


def _attend(q: Tensor, k: Tensor, v: Tensor, packed: Boundaries, scale: float) -> Tensor:
    kernel = kernel_for(q.device.type)
    if packed.gather is not None:
        return allgather_attention(q, k, v, packed.gather, scale, kernel, packed.group)
    if packed.llama3 is not None:
        return llama3_attention(q, k, v, packed.llama3, scale, packed.group)
    if packed.segments is None:
        raise TrainerError("a micro-batch without boundaries reached the attention; build it with BatchBuilder")
    return packed_attention(q, k, v, packed.segments, scale, kernel)


def register() -> None:
    """Make it known to transformers under ``NAME``."""
    AttentionInterface.register(NAME, forward)
