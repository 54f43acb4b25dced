"""Estimators with an advantage for each token."""

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from slime_like.algorithms.advantages import Groups, estimator
from slime_like.algorithms.gae import gae as packed_gae
from slime_like.algorithms.promise import Promise

_LEAST_ENERGY = 1e-12
"""Weight of a path without energy, such as a path of certain tokens. For a group of them, the baseline is the mean."""


@estimator("group", level="token", needs=("logprobs",), promise=Promise())
def optimal_token_baseline(rewards: Tensor, groups: Groups, lengths: Tensor, logprobs: Tensor) -> Tensor:
    """``G_t - sum(W_t G_t) / sum(W_t)`` over the group's other samples (after OTB, arXiv:2602.07078).

    ``G_t`` sums the rewards from sampled token t on, ``W_t`` the energies up to it: a proxy of the squared norm of the
    path's gradient. The paper's energy is ``1 - 2 p + sum(p^2)`` over the vocabulary. This one is ``1 - p``: trainers
    return no sum of squares, but the token's probability ``p`` is an unbiased estimate of it.

    After the last token of all other samples, their last baseline stays. verl 0.9.1 has 0 there, and its baseline
    includes the sample itself, which biases the gradient. If no other sample has a token, the advantage is 0.
    """
    found = [rewards] * len(lengths)
    earned, energies = rewards.split(lengths.tolist()), (-logprobs.expm1()).split(lengths.tolist())
    for group in range(len(groups.sizes)):
        members = (groups.index == group).nonzero().flatten().tolist()
        later = pad_sequence([earned[one] for one in members], batch_first=True).flip(1).cumsum(1).flip(1)
        spent = pad_sequence([energies[one] for one in members], batch_first=True).cumsum(1)
        at, own = torch.arange(later.shape[1]), lengths[members]
        weights = spent.clamp_min(_LEAST_ENERGY) * (at < own[:, None])
        others = 1 - torch.eye(len(members), dtype=rewards.dtype)
        reached = (others * own).amax(dim=1).long()
        baselines = (others @ (weights * later)) / (others @ weights)
        held = baselines.gather(1, at.minimum((reached - 1).clamp_min(0)[:, None]))
        advantages = (later - held).masked_fill(reached[:, None] == 0, 0.0)
        for one, row in zip(members, advantages, strict=True):
            found[one] = row[: lengths[one]]
    return torch.cat(found)


@estimator("group", level="token", needs=("values",), promise=Promise())
def gae(
    rewards: Tensor, groups: Groups, lengths: Tensor, values: Tensor, *, gamma: float = 1.0, lam: float = 0.95
) -> Tensor:
    """Generalized advantage estimation with the critic's values (arXiv:1506.02438, eq. 16).

    The state after a turn's last token is the first state of the next turn, whatever was observed between them.

    Args:
        gamma: discount per sampled token.
        lam: trace decay per sampled token.
    """
    every, none = torch.ones_like(rewards, dtype=torch.bool), rewards.new_zeros(len(lengths))
    return packed_gae(none, values, every, lengths, gamma, lam, token_rewards=rewards)[0]
