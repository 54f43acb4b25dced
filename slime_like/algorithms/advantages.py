"""From rewards to advantages. Groups are told apart by id, never by position, and may be uneven.

Every estimator computes in float64. A group whose rewards lie within ``eps`` of each other, and so every group of one,
has advantage exactly 0: float noise divided by float noise teaches nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch import Tensor

from slime_like.algorithms.registry import resolve

Scope = Literal["group", "batch"]


@dataclass(frozen=True, slots=True)
class AdvantageEstimator:
    """One estimator.

    Attributes:
        compute: ``(rewards (N,) float64, groups, **options) -> (N,)``.
        scope: "group" needs only completed groups; "batch" needs the whole batch, so that nothing can stream. The
            training loop gives either kind all samples of a step at once.
    """

    compute: Callable[..., Tensor]
    scope: Scope

    def __call__(self, rewards: Tensor, groups: Groups, **options: Any) -> Tensor:
        return self.compute(rewards, groups, **options)


class Groups:
    """Statistics of (N,) values per group of samples.

    Attributes:
        index: (N,) int64, each sample's group, 0 to G - 1.
        sizes: (G,) samples per group.
    """

    def __init__(self, group_ids: Sequence[int] | Tensor) -> None:
        ids = torch.as_tensor(group_ids, dtype=torch.int64)
        _, self.index, self.sizes = torch.unique(ids, return_inverse=True, return_counts=True)

    def mean(self, values: Tensor) -> Tensor:
        """(N,) mean of each sample's group."""
        return (self._sum(values) / self.sizes)[self.index]

    def std(self, values: Tensor, ddof: int) -> Tensor:
        """(N,) standard deviation of each sample's group; 0 for groups of at most ``ddof``."""
        squares = self._sum((values - self.mean(values)).square())
        return (squares / (self.sizes - ddof).clamp_min(1)).sqrt()[self.index]

    def flat(self, values: Tensor, eps: float) -> Tensor:
        """(N,) bool, True where the values of the sample's group all lie within ``eps``."""
        low, high = (
            values.new_zeros(self.sizes.numel()).scatter_reduce(0, self.index, values, how, include_self=False)
            for how in ("amin", "amax")
        )
        return (high - low <= eps)[self.index]

    def _sum(self, values: Tensor) -> Tensor:
        return values.new_zeros(self.sizes.numel()).index_add(0, self.index, values)


def compute_advantages(
    rewards: Tensor, group_ids: Sequence[int] | Tensor, estimator: str = "grpo", **options: Any
) -> Tensor:
    """One advantage per sample.

    ==================== ===== ================================================================================
    estimator            scope formula
    ==================== ===== ================================================================================
    grpo                 group ``(r - mean_g) / std_g`` (DeepSeekMath, arXiv:2402.03300, section 4.1.2)
    grpo_mean_only       group ``r - mean_g``
    dr_grpo              group ``r - mean_g``; with reduction "constant" it is Dr. GRPO (arXiv:2503.20783, section 3.2)
    rloo                 group ``r - mean of the group's other samples`` (arXiv:2402.14740, eq. 9)
    reinforce_pp         batch ``(r - mean) / std`` over the batch (REINFORCE++, arXiv:2501.03262)
    reinforce_pp_baseline batch ``(r - mean_g) / std of r - mean_g over the batch`` (the same, baseline form)
    pass_through         group ``r``
    ==================== ===== ================================================================================

    Args:
        rewards: (N,) total reward of every sample.
        group_ids: (N,) group of every sample; groups may be uneven and in any order, but must be complete.
        estimator: registered name or `package.module:name` of an ``AdvantageEstimator``.
        options: ``eps`` (spread of rewards that counts as none, default 1e-6; without effect where no
            statistic of the group is taken) and, where a standard deviation is taken,
            ``ddof`` (default 1, the sample standard deviation).

    Returns:
        (N,) in the dtype of ``rewards``, float32 for integers.

    Raises:
        ValueError: unknown estimator (the known ones are listed), shapes that differ, or a reward that is not finite.

    Example:
        >>> compute_advantages(torch.tensor([1.0, 0.0, 1.0, 1.0]), [7, 7, 9, 9])
        tensor([ 0.7071, -0.7071,  0.0000,  0.0000])
    """
    groups = Groups(group_ids)
    if rewards.ndim != 1 or rewards.shape != groups.index.shape:
        raise ValueError(
            f"rewards have shape {tuple(rewards.shape)}, group_ids {tuple(groups.index.shape)}; give (N,) of both"
        )
    if not bool(torch.isfinite(rewards).all()):
        where = int((~torch.isfinite(rewards)).nonzero()[0])
        raise ValueError(f"reward {where} is {float(rewards[where])}; every reward must be finite")
    if rewards.numel() == 0:
        return rewards
    advantages = find_estimator(estimator)(rewards.double(), groups, **options)
    return advantages.to(rewards.dtype if rewards.is_floating_point() else torch.float32)


def find_estimator(name: str) -> AdvantageEstimator:
    """The estimator with this registered name or import path.

    Raises:
        ValueError: unknown name, or an object that is no ``AdvantageEstimator`` and so declares no scope.
    """
    estimator = resolve("advantage estimator", name, ESTIMATORS)
    if not isinstance(estimator, AdvantageEstimator):
        raise ValueError(f"advantage estimator {name!r} must be an AdvantageEstimator, which declares its scope")
    return estimator


def _grpo(rewards: Tensor, groups: Groups, eps: float = 1e-6, ddof: int = 1) -> Tensor:
    """``(r - mean_g) / std_g`` (GRPO: DeepSeekMath, arXiv:2402.03300, section 4.1.2)."""
    flat = groups.flat(rewards, eps)
    spread = groups.std(rewards, ddof).masked_fill(flat, 1.0)
    return ((rewards - groups.mean(rewards)) / spread).masked_fill(flat, 0.0)


def _mean_only(rewards: Tensor, groups: Groups, eps: float = 1e-6) -> Tensor:
    """``r - mean_g``: Dr. GRPO (arXiv:2503.20783, section 3.2), which together with reduction "constant" it is."""
    return (rewards - groups.mean(rewards)).masked_fill(groups.flat(rewards, eps), 0.0)


def _rloo(rewards: Tensor, groups: Groups, eps: float = 1e-6) -> Tensor:
    """``r - mean of the group's other samples`` (RLOO: Ahmadian et al., arXiv:2402.14740, eq. 9)."""
    # r - (n mean - r) / (n - 1) = n / (n - 1) * (r - mean)
    sizes = groups.sizes[groups.index]
    return _mean_only(rewards, groups, eps) * sizes / (sizes - 1).clamp_min(1)


def _reinforce_pp(rewards: Tensor, groups: Groups, eps: float = 1e-6, ddof: int = 1) -> Tensor:
    """``(r - mean) / std`` over the batch (REINFORCE++, arXiv:2501.03262, section 3)."""
    return _grpo(rewards, Groups([0] * rewards.numel()), eps, ddof)


def _reinforce_pp_baseline(rewards: Tensor, groups: Groups, eps: float = 1e-6, ddof: int = 1) -> Tensor:
    """``(r - mean_g) / std of r - mean_g over the batch`` (REINFORCE++ baseline form, arXiv:2501.03262, section 3)."""
    centred = _mean_only(rewards, groups, eps)
    if float(centred.max() - centred.min()) <= eps:
        return torch.zeros_like(centred)
    # The batch mean of group-centred rewards is 0; not subtracting its float noise keeps flat groups at exactly 0.
    return centred / Groups([0] * centred.numel()).std(centred, ddof)


def _pass_through(rewards: Tensor, groups: Groups, eps: float = 1e-6) -> Tensor:
    """``r``: the reward itself (REINFORCE without baseline: Williams 1992)."""
    return rewards


ESTIMATORS: Mapping[str, AdvantageEstimator] = MappingProxyType(
    {
        "grpo": AdvantageEstimator(_grpo, "group"),
        "grpo_mean_only": AdvantageEstimator(_mean_only, "group"),
        "dr_grpo": AdvantageEstimator(_mean_only, "group"),
        "rloo": AdvantageEstimator(_rloo, "group"),
        "reinforce_pp": AdvantageEstimator(_reinforce_pp, "batch"),
        "reinforce_pp_baseline": AdvantageEstimator(_reinforce_pp_baseline, "batch"),
        "pass_through": AdvantageEstimator(_pass_through, "group"),
    }
)
