"""Estimators that compare the samples of a batch."""

import torch
from torch import Tensor

from slime_like.algorithms.advantages import Groups, estimator
from slime_like.algorithms.estimators.group import grpo, mean_only
from slime_like.algorithms.promise import CENTRED_PAIRS, NORMALIZED_PAIRS


@estimator("batch", promise=NORMALIZED_PAIRS)
def reinforce_pp(rewards: Tensor, groups: Groups, *, eps: float = 1e-6, ddof: int = 1) -> Tensor:
    """``(r - mean) / std`` over the batch (REINFORCE++, arXiv:2501.03262, section 3).

    Args:
        eps: largest spread of the rewards that counts as none.
        ddof: 1: sample standard deviation; 0: population.
    """
    return grpo(rewards, Groups.all_in_one(rewards), eps=eps, ddof=ddof)


@estimator("batch", promise=NORMALIZED_PAIRS)
def reinforce_pp_baseline(rewards: Tensor, groups: Groups, *, eps: float = 1e-6, ddof: int = 1) -> Tensor:
    """``(r - mean_g) / std over the batch`` (REINFORCE++ with baseline, arXiv:2501.03262, section 3).

    Args:
        eps: largest spread of rewards that counts as none.
        ddof: 1: sample standard deviation; 0: population.
    """
    centred = mean_only(rewards, groups, eps=eps)
    if float(centred.max() - centred.min()) <= eps:
        return torch.zeros_like(centred)
    # The batch mean of group-centred rewards is 0. Not subtracting its rounding noise keeps flat groups at exactly 0.
    return centred / Groups.all_in_one(centred).std(centred, ddof)


@estimator("batch", promise=CENTRED_PAIRS)
def gpg(rewards: Tensor, groups: Groups, *, eps: float = 1e-6) -> Tensor:
    """``alpha (r - mean_g)``, with ``alpha = B / (B - M)`` (GPG, arXiv:2504.02546).

    B counts samples, and M those in groups without spread, whose zeros would otherwise shrink the mean gradient. (verl
    0.9.1 counts samples with reward 0 instead.)

    Args:
        eps: largest spread of a group's rewards that counts as none.
    """
    informative = int((~groups.flat(rewards, eps)).sum())
    return mean_only(rewards, groups, eps=eps) * (rewards.numel() / max(1, informative))


@estimator("batch", needs=("functions", "weights"), promise=NORMALIZED_PAIRS)
def gdpo(
    rewards: Tensor, groups: Groups, functions: Tensor, weights: Tensor, *, eps: float = 1e-6, ddof: int = 1
) -> Tensor:
    """``grpo`` of each reward function, weighted and summed, then normalized over the batch (GDPO, arXiv:2601.05242).

    A function with a large spread does not drown out the others.

    Args:
        eps: largest spread of rewards that counts as none.
        ddof: 1: sample standard deviation; 0: population.
    """
    each = [grpo(column, groups, eps=eps, ddof=ddof) for column in functions.unbind(dim=1)]
    return reinforce_pp(torch.stack(each, dim=1) @ weights, groups, eps=eps, ddof=ddof)
