"""Collectives that autograd understands, beyond those that Megatron brings."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


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
