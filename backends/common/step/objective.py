"""One optimizer step's loss and sums on one rank, and the checks that all ranks must agree on before they update."""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from backends.common.process.agreement import rank_error
from backends.common.step.balance import NO_BALANCE, Balance
from backends.common.step.routes import Replay
from slime_like.algorithms.importance import find_correction
from slime_like.algorithms.losses.kl import find_kl_estimator
from slime_like.algorithms.losses.loss import Loss, build_policy, check_terms
from slime_like.algorithms.losses.policy import LossInputs, PolicyLoss, PolicyTerms
from slime_like.algorithms.losses.sums import LossSums, Sums, ValueSums
from slime_like.config import AlgorithmConfig, RunConfig
from slime_like.config.base import Part
from slime_like.errors import TrainerError
from slime_like.plugins.options import load_option
from slime_like.plugins.resolve import naming
from slime_like.trajectory import PackedTrajectory


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
    mine = torch.full((1,), -1, dtype=torch.int64, device=device)
    if step.losses:
        bad = ~torch.isfinite(torch.stack(step.losses))
        mine = torch.where(bad.any(), bad.int().argmax(), mine)
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


ValueInputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
"""Values, old values, returns, loss mask and token weights, (R,) each."""


class ValueLoss:
    """The critic's loss, in place of a policy's ``Loss``."""

    def __init__(self, config: RunConfig) -> None:
        self._loss, self._clip = load_option("value-loss"), config.critic.value_clip

    def inputs(self, pack: PackedTrajectory, values: Tensor) -> ValueInputs:
        """Return the inputs of a pack; ``values`` is (R,) for the whole pack, with graph."""
        if pack.values is None or pack.returns is None:
            raise rank_error(
                "accumulate",
                "a pack has no values or no returns",
                code="no-returns",
                remedy="score it first, and set the returns that follow from its rewards",
            )
        return values, pack.values, pack.returns, pack.loss_mask, pack.token_weights

    def __call__(self, inputs: ValueInputs) -> tuple[Tensor, ValueSums]:
        found: tuple[Tensor, ValueSums] = self._loss(*inputs, self._clip)
        return found


LOSSES_OF_HEADS: Mapping[str, Callable[[RunConfig], Any]] = {
    "logprob": lambda config: configured_loss(config.algorithm, config.distillation.exact_coef),
    "value": ValueLoss,
}
"""Loss of a trained role, by the name of its head. ``inputs`` gets a pack and the head's outputs in order; the loss is
called with them, and returns the undivided sum and its metrics."""


def configured_loss(config: AlgorithmConfig, distillation: float = 0.0) -> Loss:
    """Build the configured loss, as ``build_loss`` does. ``distillation``: see ``Loss``.

    Raises:
        TrainerError: a user's part cannot be imported or built; or, when called, it raised or returned something
            invalid.
    """
    policy = cast("PolicyLoss", _UsersPolicy(config.loss)) if ":" in config.loss.name else build_policy(config.loss)
    estimator = _users_function("algorithm.kl.estimator", config.kl.estimator, find_kl_estimator)
    correction = _users_function("algorithm.importance.correction", config.importance.correction, find_correction)
    return Loss(config, policy, estimator, correction, distillation)


class _UsersPolicy:
    """A user's policy term."""

    def __init__(self, loss: Part) -> None:
        self._path = loss.name
        with _naming("algorithm.loss", self._path, "__init__"):
            self._policy = build_policy(loss)
            self.name = self._policy.name
            self.needs_old, self.needs_advantages = self._policy.needs_old, self._policy.needs_advantages

    def __call__(self, inputs: LossInputs) -> PolicyTerms:
        with _naming("algorithm.loss", self._path, "__call__"):
            terms = self._policy(inputs)
            check_terms(self.name, terms, inputs)
        return terms


_Part = TypeVar("_Part", bound=Callable[..., Any])


def _users_function(setting: str, path: str, find: Callable[[str], _Part]) -> _Part | None:
    """Return a user's function by import path, with errors that name it; ``None`` for a built-in part."""
    if ":" not in path:
        return None
    with _naming(setting, path, ""):
        function = find(path)
    return _naming(setting, path, "")(function)


_naming = partial(naming, TrainerError, "custom-loss-failed")
