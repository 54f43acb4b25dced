"""Choice of a micro-batch's packed attention by its name in ``trainer.attention``."""

from typing import Literal

import torch.distributed as dist
from torch import Tensor

from backends.common.attention.allgather import AllGatherAttention
from backends.common.attention.kernels import Segments
from backends.common.attention.packed_attention import LocalAttention, PackedAttention
from backends.common.attention.prefixes import PrefixAttention
from backends.common.attention.ring import RingAttention, RingSegments
from backends.common.attention.ring_flash_attn import Llama3Segments, RingFlashAttention
from slime_like.algorithms.context import ContextShard
from slime_like.errors import TrainerError

AnyAttention = PackedAttention | RingFlashAttention


def choose_attention(
    name: Literal["ring", "allgather", "ring_flash_attn"], shard: ContextShard, group: dist.ProcessGroup
) -> AnyAttention:
    """Return the attention of ``shard`` with the parts of its pack on the other ranks of ``group``."""
    boundaries, size = shard.cu_seqlens_padded, group.size()
    if shard.parents is not None:
        return _of_prefixes(name, shard, shard.parents, group)
    if size == 1:
        return LocalAttention(Segments.of(boundaries))
    if name == "ring":
        return RingAttention(RingSegments.of(boundaries, size), group)
    if name == "ring_flash_attn":
        return RingFlashAttention(Llama3Segments.of(boundaries, group.rank(), size), group)
    # Boundaries of the whole pack: a sequence from earlier ranks begins there.
    begin = group.rank() * shard.tokens.numel()
    return AllGatherAttention.of(boundaries, shard.cu_seqlens_local, begin, group)


def _of_prefixes(name: str, shard: ContextShard, parents: Tensor, group: dist.ProcessGroup) -> PrefixAttention:
    if group.size() > 1 and name != "allgather":
        raise TrainerError(
            f"attention {name} over {group.size()} context ranks does not support sequences that share prefixes",
            code="prefixes-not-supported",
            remedy="set trainer.attention=allgather, or trainer.share_prefixes=false",
        )
    length = shard.tokens.numel()
    part = range(group.rank() * length, (group.rank() + 1) * length)
    return PrefixAttention.of(shard.cu_seqlens_padded, parents, part, group)
