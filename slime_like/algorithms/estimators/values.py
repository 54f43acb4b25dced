"""Estimators that need a critic's values."""

import torch
from torch import Tensor

from slime_like.algorithms.advantages import Groups, estimator
from slime_like.algorithms.gae import gae as packed_gae


@estimator("batch", level="token", needs=("values",))
def gae(
    rewards: Tensor, groups: Groups, lengths: Tensor, values: Tensor, *, gamma: float = 1.0, lam: float = 0.95
) -> Tensor:
    """Generalized advantage estimation with the critic's values (arXiv:1506.02438, eq. 16).

    The next state of a turn's last token is the first one of the next turn, whatever was observed between them.

    Args:
        gamma: discount per sampled token.
        lam: trace decay per sampled token.
    """
    every, none = torch.ones_like(rewards, dtype=torch.bool), rewards.new_zeros(len(lengths))
    return packed_gae(none, values, every, lengths, gamma, lam, token_rewards=rewards).advantages
