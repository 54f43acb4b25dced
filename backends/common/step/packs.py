"""A pack on its way into a model."""

from dataclasses import dataclass, fields, replace
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor

from slime_like.algorithms.context import ContextShard
from slime_like.algorithms.packing.pack import response_tokens
from slime_like.trajectory import PackedTrajectory


@dataclass
class ResponseRows:
    """(r,) int64 rows of the local token axis whose hidden state predicts a response token, their int64 target ids
    and float64 temperatures.
    """

    index: Tensor
    targets: Tensor
    temperatures: Tensor

    @classmethod
    def of(cls, pack: PackedTrajectory, shard: ContextShard) -> Self:
        """Those of this rank's ``shard`` of ``pack``."""
        temperatures = pack.temperatures.repeat_interleave(pack.response_lens)
        return cls(shard.response_index, response_tokens(pack)[shard.response_slot], temperatures[shard.response_slot])


@dataclass(slots=True)
class MicroBatch:
    """The pack as ``given`` to the trainer, the same on this rank's device, whole, and this rank's part of it.

    ``context``: ranks that share the pack.
    """

    given: PackedTrajectory
    pack: PackedTrajectory
    shard: ContextShard
    context: dist.ProcessGroup

    def whole(self, part: Tensor) -> tuple[Tensor, Tensor]:
        """(R,) logprobs and entropies of the pack from this context rank's (2, r), differentiable."""
        scattered = torch.stack([self.shard.scatter(part[0]), self.shard.scatter(part[1])])
        logprobs, entropy = join_context_parts(scattered, self.context)
        return logprobs, entropy


def on_device(pack: PackedTrajectory, device: torch.device) -> PackedTrajectory:
    """``pack`` itself if it is there already, else a copy."""
    tensors = {f.name: value for f in fields(pack) if isinstance(value := getattr(pack, f.name), Tensor)}
    if all(tensor.device == device for tensor in tensors.values()):
        return pack
    moved: dict[str, Any] = {name: tensor.to(device, non_blocking=True) for name, tensor in tensors.items()}
    return replace(pack, **moved)


class _SumForward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        total = x.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return grads[0], None


def join_context_parts(part: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum over the context group of parts that are zero where another rank's tokens stand.

    Every rank computes the same loss of the whole result. In backward each keeps the gradient as it is, and so takes
    its own tokens' share of it: the sum over ranks, which data-parallel reduction makes, is the gradient once.
    """
    return part if group.size() == 1 else _SumForward.apply(part, group)
