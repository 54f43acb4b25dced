"""One optimizer step's sums on one rank, and the checks that all ranks must agree on before they update."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from backends.common.process.agreement import rank_error
from backends.common.step.balance import NO_BALANCE, Balance
from backends.common.step.routes import Replay
from slime_like.algorithms.losses.sums import LossSums, Sums
from slime_like.errors import TrainerError


@dataclass(slots=True)
class StepSums:
    """Sums accumulated since ``begin_step``.

    Attributes:
        denominator: divisor of the gradients, if known when the step begins.
        balance: what balances experts.
        replay: the replay of routes, if it is set.
        sums: metrics of this rank's micro-batches (last pipeline stage only).
        sums_of: the same of the micro-batches of each source.
        losses: detached loss of every micro-batch, in order.
        complete: the step's last window has been opened.
    """

    denominator: float | None = None
    balance: Balance = NO_BALANCE
    replay: Replay | None = None
    sums: Sums | None = None
    sums_of: dict[str | None, Sums] = field(default_factory=dict)
    losses: list[Tensor] = field(default_factory=list)
    complete: bool = False

    def add(self, loss: Tensor, sums: Sums, source: str | None = None) -> None:
        """Add one micro-batch, perhaps of only one source."""
        self.losses.append(loss.detach())
        self.sums = sums if self.sums is None else self.sums.add(sums)
        self.sums_of[source] = sums if source not in self.sums_of else self.sums_of[source].add(sums)

    def kls_of(self, sources: Iterable[str], replicas: dist.ProcessGroup) -> dict[str, float]:
        """Return the mean exact KL to the teacher of each source with tokens. Collective over the replicas."""
        zeros = LossSums.zeros(self.losses[0].device)
        found: dict[str, Any] = {name: reduce_over_data(self.sums_of.get(name, zeros), replicas) for name in sources}
        return {name: float(sums.divergence / sums.num_tokens) for name, sums in found.items() if sums.num_tokens}

    def router_figures(self, layers: int, device: torch.device) -> dict[str, Any]:
        """Return fields of ``GRPOStats``; ``layers`` with experts. Collective over the world."""
        loss, loads, replay = self.balance.loss, self.balance.loads, self.replay
        figures = {} if loss is None else loss.metrics(layers, device)
        figures |= {} if loads is None else loads.metrics()
        return figures | ({} if replay is None else replay.metrics(device))

    def open_window(self, last: bool) -> None:
        """Accept a window, unless it follows the step's ``last`` one."""
        if self.complete:
            raise rank_error(
                "accumulate",
                "a window follows the step's last one",
                code="window-after-last",
                remedy="give last=True only with the last one",
            )
        self.complete = last

    def require_denominator(self, denominator: float) -> None:
        """Reject a denominator that differs from the one given when the step began."""
        if self.denominator not in (None, denominator):
            raise rank_error(
                "finish_step",
                f"denominator={denominator} differs from the {self.denominator} given to begin_step",
                code="denominator",
                remedy="give the same one to both",
            )


def require_finite_losses(step: StepSums, device: torch.device) -> None:
    """Raise on every rank if any rank has a loss that is not finite. The error names the first such rank."""
    bad = (~torch.isfinite(torch.stack(step.losses))).nonzero().flatten().tolist() if step.losses else []
    mine = torch.tensor(bad[:1] or [-1], dtype=torch.int64, device=device)
    everyone = torch.empty(dist.get_world_size(), dtype=torch.int64, device=device)
    dist.all_gather_into_tensor(everyone, mine)
    for rank, micro_batch in enumerate(everyone.tolist()):
        if micro_batch >= 0:
            raise TrainerError(
                "the loss is not finite; nothing was updated",
                code="loss-not-finite",
                who=f"rank {rank}",
                phase=f"forward of micro-batch {micro_batch}",
                remedy="lower trainer.optimizer.lr, or check this batch's logprobs and advantages",
            )


def require_finite_norm(norm: float) -> None:
    """Raise if the norm is not finite. It is the same on every rank, so all ranks raise."""
    if not math.isfinite(norm):
        raise rank_error(
            "gradient reduction",
            f"the gradient norm is {norm}; nothing was updated",
            code="gradient-not-finite",
            remedy="lower trainer.optimizer.lr or trainer.optimizer.clip_grad",
        )


def reduce_over_data(sums: Sums, replicas: dist.ProcessGroup) -> Sums:
    """Sum over data-parallel replicas. One replica's context ranks hold the same metrics and count once."""
    if replicas.size() == 1:
        return sums
    totals, maxima = sums.to_vectors()
    dist.all_reduce(totals, group=replicas)
    dist.all_reduce(maxima, op=dist.ReduceOp.MAX, group=replicas)
    return sums.from_vectors(totals, maxima)
