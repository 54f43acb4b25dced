"""The sums of one optimizer step on one rank, and what all ranks must agree on before they update."""

import math
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from backends.common.step.balance import BalanceLoss
from slime_like.algorithms.losses import LossSums
from slime_like.errors import TrainerError


@dataclass(slots=True)
class StepSums:
    """Sums accumulated since ``begin_step``.

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

    def open_window(self, count: int, last: bool) -> None:
        """Take note of a window of ``count`` micro-batches, the step's ``last`` or not.

        Raises:
            TrainerError: it is empty, or the step's last one has been given already.
        """
        if self.complete:
            raise TrainerError(
                f"rank {dist.get_rank()}, accumulate: a window follows the one that was the step's last; "
                "give last=True with the last one only"
            )
        if not count:
            raise TrainerError(
                f"rank {dist.get_rank()}, accumulate: the window is empty; every rank needs the same number of "
                "micro-batches (fill up with zero-weight ones)"
            )
        self.complete = last

    def require_denominator(self, denominator: float) -> None:
        """Refuse a denominator that no step can have, or not the one that the step began with.

        Raises:
            TrainerError: it is.
        """
        if not denominator > 0:
            raise TrainerError(
                f"rank {dist.get_rank()}, finish_step: denominator={denominator} is not positive; "
                "a step needs at least one token that carries loss"
            )
        if self.denominator not in (None, denominator):
            raise TrainerError(
                f"rank {dist.get_rank()}, finish_step: denominator={denominator} is not the {self.denominator} that "
                "begin_step was given; give both the same"
            )

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


def reduced_over_data(sums: LossSums, replicas: dist.ProcessGroup) -> LossSums:
    """Summed over data-parallel replicas; context ranks of one replica hold the same figures and count once."""
    if replicas.size() == 1:
        return sums
    totals, maxima = sums.to_vectors()
    dist.all_reduce(totals, group=replicas)
    dist.all_reduce(maxima, op=dist.ReduceOp.MAX, group=replicas)
    return LossSums.from_vectors(totals, maxima)
