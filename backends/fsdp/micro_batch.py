"""One rank's model input from a pack: its contiguous part, boundaries and response rows."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from backends.common.attention.allgather import GatherSegments
from backends.common.attention.kernels import Segments
from backends.common.attention.ring_flash_attn import Llama3Segments
from backends.common.step.balance import BalanceLoss, RoutedTokens
from backends.common.step.packs import ResponseRows, on_device
from backends.fsdp.attention import Boundaries
from slime_like.algorithms.context import ContextShard, split_for_context_parallel
from slime_like.algorithms.packing.pack import response_tokens
from slime_like.trajectory import PackedTrajectory


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """One pack on this rank's device.

    Attributes:
        given: the pack as the trainer was given it.
        pack: the same on this rank's device, whole on every context rank.
        shard: this rank's part of it.
        boundaries: what attention reads.
        responses: what the head scores.
        routed: whose tokens the routers see, where the objective balances them.
    """

    given: PackedTrajectory
    pack: PackedTrajectory
    shard: ContextShard
    boundaries: Boundaries
    responses: ResponseRows
    routed: RoutedTokens | None


@dataclass(frozen=True, slots=True)
class BatchBuilder:
    """Makes micro-batches for one rank.

    Attributes:
        device: where the model computes.
        context: ranks that share every pack.
        by_package: several context ranks attend by ring-flash-attn instead of our own all-gather.
    """

    device: torch.device
    context: dist.ProcessGroup
    by_package: bool

    def build(self, pack: PackedTrajectory, balance: BalanceLoss | None = None) -> MicroBatch:
        """Cut this rank's part out of ``pack``, which is the same on every rank that shares it."""
        moved = on_device(pack, self.device)
        size, rank = self.context.size(), self.context.rank()
        shard = split_for_context_parallel(moved, size, rank, layout="contiguous")
        temperatures = moved.temperatures.repeat_interleave(moved.response_lens)
        responses = ResponseRows(
            index=shard.response_index,
            targets=response_tokens(moved)[shard.response_slot],
            temperatures=temperatures[shard.response_slot],
        )
        routed = None if balance is None else RoutedTokens.of(moved, shard, slice(None), balance)
        return MicroBatch(
            pack, moved, shard, self._boundaries(shard.cu_seqlens_padded, shard, pack.max_seqlen), responses, routed
        )

    def _boundaries(self, cu_seqlens: Tensor, shard: ContextShard, longest: int) -> Boundaries:
        """``cu_seqlens`` are those of the whole pack: what reaches in from other ranks begins there."""
        size, rank = self.context.size(), self.context.rank()
        if size == 1:
            return Boundaries(Segments.of(cu_seqlens), None, None, self.context, longest)
        if self.by_package:
            return Boundaries(None, None, Llama3Segments.of(cu_seqlens, rank, size), self.context, longest)
        gather = GatherSegments.of(cu_seqlens, shard.cu_seqlens_local, rank * shard.tokens.numel())
        return Boundaries(None, gather, None, self.context, longest)
