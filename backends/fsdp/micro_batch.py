"""One rank's model input from a pack: its contiguous part, attention and response rows."""

from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from backends.common.attention import choose_attention
from backends.common.linear_attention import Recurrence
from backends.common.step.balance import NO_BALANCE, Balance, RoutedTokens
from backends.common.step.packs import MicroBatch, ResponseRows, on_device
from backends.common.step.routes import Replay
from backends.fsdp.attention import TokenMixers
from slime_like.algorithms.context import split_for_context_parallel
from slime_like.trajectory import PackedTrajectory


@dataclass(slots=True)
class FsdpInput(MicroBatch):
    """One pack on this rank's device; ``routed`` is set if routers balance or replay."""

    mixers: TokenMixers
    responses: ResponseRows
    routed: RoutedTokens | None


def model_input(
    pack: PackedTrajectory,
    device: torch.device,
    context: dist.ProcessGroup,
    by_package: bool = False,
    balance: Balance = NO_BALANCE,
    replay: Replay | None = None,
    recurs: bool = False,
) -> FsdpInput:
    """Take this rank's part of ``pack``, which is the same on every rank that shares it.

    ``by_package``: several context ranks attend with ring-flash-attn instead of our all-gather. ``recurs``: some layers
    have linear attention.
    """
    shard = split_for_context_parallel(pack, context.size(), context.rank(), layout="contiguous")
    attention = choose_attention("ring_flash_attn" if by_package else "allgather", shard, context)
    routed = RoutedTokens.of(pack, shard, slice(None), balance, replay)
    recurrence = Recurrence.of(shard, context) if recurs else None
    mixers, responses = TokenMixers(attention, recurrence), ResponseRows.of(pack, shard)
    needed = replace(pack, teacher_hidden=None)  # ``responses`` has this rank's part
    moved, shard, mixers, responses, routed = on_device((needed, shard, mixers, responses, routed), device)
    return FsdpInput(pack, moved, shard, context, mixers, responses, routed)
