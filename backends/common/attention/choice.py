"""The packed attention of one micro-batch, by its name in ``trainer.attention``."""

from typing import Literal

import torch.distributed as dist

from backends.common.attention.allgather import AllGatherAttention
from backends.common.attention.kernels import Segments
from backends.common.attention.packed_attention import LocalAttention, PackedAttention
from backends.common.attention.ring import RingAttention, RingSegments
from backends.common.attention.ring_flash_attn import Llama3Segments, RingFlashAttention
from slime_like.algorithms.context import ContextShard

AnyAttention = PackedAttention | RingFlashAttention


def choose_attention(
    name: Literal["ring", "allgather", "ring_flash_attn"], shard: ContextShard, group: dist.ProcessGroup
) -> AnyAttention:
    """Attention of ``shard`` with the other parts of its pack, which the other ranks of ``group`` hold."""
    boundaries, size = shard.cu_seqlens_padded, group.size()
    if size == 1:
        return LocalAttention(Segments.of(boundaries))
    if name == "ring":
        return RingAttention(RingSegments.of(boundaries, size), group)
    if name == "ring_flash_attn":
        return RingFlashAttention(Llama3Segments.of(boundaries, group.rank(), size), group)
    # Boundaries of the whole pack: what reaches in from other ranks begins there.
    begin = group.rank() * shard.tokens.numel()
    return AllGatherAttention.of(boundaries, shard.cu_seqlens_local, begin, group)
