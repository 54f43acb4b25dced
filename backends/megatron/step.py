"""The sums of one optimizer step on one rank, and what all ranks must agree on before they update."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from backends.megatron.router import BalanceLoss
from slime_like.algorithms.losses import LossSums
from slime_like.errors import TrainerError


@dataclass(slots=True)
class StepSums:
    """What has been accumulated since ``begin_step``.

    Attributes:
        denominator: what gradients will be divided by, where it is known at the beginning.
        balance: the routers' loss, where the objective has one.
        sums: figures of this rank's micro-batches (last pipeline stage only).
        losses: detached loss of every micro-batch, in order.
        complete: the step's last window has been given.
    """

    denominator: float | None = None
    balance: BalanceLoss | None = None
    sums: LossSums | None = None
    losses: list[Tensor] = field(default_factory=list)
    complete: bool = False

    def add(self, loss: Tensor, sums: LossSums) -> None:
        """Take in one micro-batch."""
        self.losses.append(loss.detach())
        self.sums = sums if self.sums is None else self.sums.add(sums)

    def bad_micro_batch(self) -> int | None:
        """Index of the first micro-batch whose loss is not finite."""
        if not self.losses:
            return None
        bad = (~torch.isfinite(torch.stack(self.losses))).nonzero()
        return int(bad[0]) if len(bad) else None


def require_finite_losses(step: StepSums, device: torch.device) -> None:
    """Every rank raises if any rank saw a loss that is not finite, and names the first such rank.

    Raises:
        TrainerError: with rank, phase and micro-batch.
    """
    bad = step.bad_micro_batch()
    mine = torch.tensor([-1 if bad is None else bad], dtype=torch.int64, device=device)
    everyone = torch.empty(dist.get_world_size(), dtype=torch.int64, device=device)
    dist.all_gather_into_tensor(everyone, mine)
    for rank, micro_batch in enumerate(everyone.tolist()):
        if micro_batch >= 0:
            raise TrainerError(
                f"rank {rank}, forward of micro-batch {micro_batch}: the loss is not finite; nothing was updated. "
                "Lower trainer.optimizer.lr, or look at this batch's logprobs and advantages"
            )


def require_finite_norm(norm: float) -> None:
    """The norm is the same on every rank, so that all raise.

    Raises:
        TrainerError: with rank and phase.
    """
    if not math.isfinite(norm):
        raise TrainerError(
            f"rank {dist.get_rank()}, gradient reduction: the gradient norm is {norm}; nothing was updated. "
            "Lower trainer.optimizer.lr or trainer.optimizer.clip_grad"
        )


def reduced_over_data(sums: LossSums) -> LossSums:
    """Summed over data-parallel replicas; context ranks of one replica hold the same figures and count once."""
    group = parallel_state.get_data_parallel_group(with_context_parallel=False)
    if group.size() == 1:
        return sums
    totals, maxima = sums.to_vectors()
    dist.all_reduce(totals, group=group)
    dist.all_reduce(maxima, op=dist.ReduceOp.MAX, group=group)
    return LossSums.from_vectors(totals, maxima)
