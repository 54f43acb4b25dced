"""Estimators that compare the samples of a group."""

from torch import Tensor

from slime_like.algorithms.advantages import Groups, estimator


@estimator("group")
def grpo(rewards: Tensor, groups: Groups, *, eps: float = 1e-6, ddof: int = 1) -> Tensor:
    """``(r - mean_g) / std_g`` (DeepSeekMath, arXiv:2402.03300, section 4.1.2).

    Args:
        eps: largest spread of a group's rewards that counts as none.
        ddof: 1: sample standard deviation; 0: population.
    """
    flat = groups.flat(rewards, eps)
    spread = groups.std(rewards, ddof).masked_fill(flat, 1.0)
    return ((rewards - groups.mean(rewards)) / spread).masked_fill(flat, 0.0)


@estimator("group")
def mean_only(rewards: Tensor, groups: Groups, *, eps: float = 1e-6) -> Tensor:
    """``r - mean_g`` (Dr. GRPO, arXiv:2503.20783, section 3.2, with reduction "constant").

    Args:
        eps: largest spread of a group's rewards that counts as none.
    """
    return (rewards - groups.mean(rewards)).masked_fill(groups.flat(rewards, eps), 0.0)


@estimator("group")
def rloo(rewards: Tensor, groups: Groups, *, eps: float = 1e-6) -> Tensor:
    """``r - mean of the group's other samples`` (arXiv:2402.14740, eq. 9).

    Args:
        eps: largest spread of a group's rewards that counts as none.
    """
    # r - (n mean - r) / (n - 1) = n / (n - 1) * (r - mean)
    sizes = groups.sizes[groups.index]
    return mean_only(rewards, groups, eps=eps) * sizes / (sizes - 1).clamp_min(1)


@estimator("group")
def pass_through(rewards: Tensor, groups: Groups) -> Tensor:
    """``r`` (REINFORCE without baseline: Williams 1992)."""
    return rewards
