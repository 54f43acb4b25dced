"""Attention over packed sequences, on one rank and over context-parallel ranks, chosen by ``trainer.attention``."""

from typing import Literal, Protocol

import torch.distributed as dist
from torch import Tensor

from backends.common.attention.kernels import Segments
from backends.common.attention.packed_attention import LocalAttention, RingAttention, RingSegments
from slime_like.algorithms.context import ContextShard
from slime_like.errors import TrainerError
from slime_like.plugins.options import load_option


class AnyAttention(Protocol):
    """Attention of one micro-batch; see ``PackedAttention``."""

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None = None, sinks: Tensor | None = None
    ) -> Tensor: ...


def choose_attention(
    name: Literal["ring", "allgather", "ring_flash_attn"], shard: ContextShard, group: dist.ProcessGroup
) -> AnyAttention:
    """Return the attention of ``shard`` with the parts of its pack on the other ranks of ``group``."""
    boundaries, size, length = shard.cu_seqlens_padded, group.size(), shard.tokens.numel()
    if shard.parents is None and size == 1:
        return LocalAttention(Segments.of(boundaries))
    if shard.parents is not None and size > 1 and name != "allgather":
        raise TrainerError(
            f"attention {name} over {size} context ranks does not support sequences that share prefixes",
            code="prefixes-not-supported",
            remedy="set trainer.attention=allgather, or trainer.share_prefixes=false",
        )
    if size > 1 and name == "ring":
        return RingAttention(RingSegments.of(boundaries, size), group)
    if size > 1 and name == "ring_flash_attn":
        found: AnyAttention = load_option("ring-flash-attention").of(boundaries, group)
        return found
    part = range(group.rank() * length, (group.rank() + 1) * length)
    gathered: AnyAttention = load_option("gathered-attention").of(boundaries, shard.parents, part, group)
    return gathered
