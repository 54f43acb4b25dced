"""Estimators that compare the samples of a batch."""

import torch
from torch import Tensor

from slime_like.algorithms.advantages import Groups, estimator
from slime_like.algorithms.estimators.group import grpo, mean_only


@estimator("batch")
def reinforce_pp(rewards: Tensor, groups: Groups, *, eps: float = 1e-6, ddof: int = 1) -> Tensor:
    """``(r - mean) / std`` over the batch (REINFORCE++, arXiv:2501.03262, section 3).

    Args:
        eps: largest spread of the rewards that counts as none.
        ddof: 1: sample standard deviation; 0: population.
    """
    return grpo(rewards, Groups.all_in_one(rewards), eps=eps, ddof=ddof)


@estimator("batch")
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
