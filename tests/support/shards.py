"""What tests need to know about a context rank's shard."""

from torch import Tensor

from slime_like.algorithms.context import ContextShard


def local_boundaries(shard: ContextShard) -> Tensor:
    """Return the boundaries of the segments in a shard, int32, as many as in ``cu_seqlens_padded``."""
    if shard.layout == "zigzag":
        return shard.cu_seqlens_padded // shard.cp_size
    length = shard.tokens.numel()
    return (shard.cu_seqlens_padded - shard.cp_rank * length).clamp(0, length)
