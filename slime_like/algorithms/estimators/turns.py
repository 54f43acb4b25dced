"""Estimators with an advantage for each turn of a conversation, from the rewards of its turns."""

import torch
from torch import Tensor

from slime_like.algorithms.advantages import Groups, estimator
from slime_like.algorithms.promise import CENTRED_PAIRS, Promise


def returns(rewards: Tensor, lengths: Tensor, gamma: float) -> Tensor:
    """Return (E,) discounted sums of each turn's own and later rewards."""
    found, at = rewards.clone(), 0
    for length in lengths.tolist():
        for turn in range(at + length - 2, at - 1, -1):
            found[turn] += gamma * found[turn + 1]
        at += length
    return found


@estimator("group", level="turn", promise=Promise())
def turn_rloo(rewards: Tensor, groups: Groups, lengths: Tensor, *, gamma: float = 1.0) -> Tensor:
    """``G_k - mean of the returns of the group's other samples``: a baseline that ignores the sample's own actions.

    ``G_k`` sums the rewards of turn k and later ones. With one reward at the end it is RLOO (arXiv:2402.14740, eq. 9).
    A baseline per turn index, over the samples that get that far, would be biased: it would pay for ending early.

    Args:
        gamma: discount per turn.
    """
    to_go = returns(rewards, lengths, gamma)
    starts = lengths.cumsum(0) - lengths
    whole = torch.where(lengths > 0, to_go[starts.clamp_max(max(0, len(to_go) - 1))], 0.0)
    sizes = groups.sizes[groups.index]
    others = (groups.mean(whole) * sizes - whole) / (sizes - 1).clamp_min(1)
    alone = (sizes == 1).repeat_interleave(lengths)
    return (to_go - others.repeat_interleave(lengths)).masked_fill(alone, 0.0)


@estimator("group", level="turn", promise=CENTRED_PAIRS)
def turn_index_mean(rewards: Tensor, groups: Groups, lengths: Tensor, *, gamma: float = 1.0) -> Tensor:
    """``G_k - mean of G_k over the group's samples with a turn k``: biased towards ending early or late, as several
    published multi-turn versions of GRPO are.

    Args:
        gamma: discount per turn.
    """
    to_go = returns(rewards, lengths, gamma)
    turns = torch.arange(len(to_go)) - (lengths.cumsum(0) - lengths).repeat_interleave(lengths)
    width = int(lengths.max()) if len(lengths) else 0
    return to_go - Groups(groups.index.repeat_interleave(lengths) * width + turns).mean(to_go)
