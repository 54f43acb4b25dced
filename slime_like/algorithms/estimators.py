"""Advantage estimators, one function each; see ``slime_like.algorithms.advantages``."""

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from slime_like.algorithms.advantages import SampleGroups, estimator
from slime_like.algorithms.promise import CENTRED, CENTRED_PAIRS, NORMALIZED_PAIRS, Promise
from slime_like.plugins.options import load_option


@estimator("group", promise=NORMALIZED_PAIRS)
def grpo(rewards: Tensor, groups: SampleGroups, *, eps: float = 1e-6, ddof: int = 1) -> Tensor:
    """``(r - mean_g) / std_g`` (DeepSeekMath, arXiv:2402.03300, section 4.1.2).

    Args:
        eps: largest spread of a group's rewards that counts as none.
        ddof: 1: sample standard deviation; 0: population.
    """
    flat = groups.flat(rewards, eps)
    spread = groups.std(rewards, ddof).masked_fill(flat, 1.0)
    return ((rewards - groups.mean(rewards)) / spread).masked_fill(flat, 0.0)


@estimator("group", promise=CENTRED)
def mean_only(rewards: Tensor, groups: SampleGroups, *, eps: float = 1e-6) -> Tensor:
    """``r - mean_g`` (Dr. GRPO, arXiv:2503.20783, section 3.2, with reduction "constant").

    Args:
        eps: largest spread of a group's rewards that counts as none.
    """
    return (rewards - groups.mean(rewards)).masked_fill(groups.flat(rewards, eps), 0.0)


@estimator("group", promise=Promise())
def rloo(rewards: Tensor, groups: SampleGroups, *, eps: float = 1e-6) -> Tensor:
    """``r - mean of the group's other samples`` (arXiv:2402.14740, eq. 9).

    Args:
        eps: largest spread of a group's rewards that counts as none.
    """
    # r - (n mean - r) / (n - 1) = n / (n - 1) * (r - mean)
    sizes = groups.sizes[groups.index]
    return mean_only(rewards, groups, eps=eps) * sizes / (sizes - 1).clamp_min(1)


@estimator("group", needs=("tokens",), promise=CENTRED_PAIRS)
def opo(rewards: Tensor, groups: SampleGroups, tokens: Tensor, *, eps: float = 1e-6) -> Tensor:
    """``r - sum(l r) / sum(l)`` over the group, with lengths l in tokens (OPO, arXiv:2505.23585).

    The baseline of least variance if a token's score has the same norm everywhere. 0 if the group has no tokens.

    Args:
        eps: largest spread of a group's rewards that counts as none.
    """
    lengths = tokens.to(rewards.dtype)
    length = groups.mean(lengths)
    is_flat = groups.flat(rewards, eps) | (length == 0)
    return (rewards - groups.mean(lengths * rewards) / length).masked_fill(is_flat, 0.0)


@estimator("group", promise=Promise("best reward", lambda samples: 1 / samples))
def pass_at_k(rewards: Tensor, groups: SampleGroups, *, eps: float = 1e-6) -> Tensor:
    """``max_g - max of the group's other samples``: pass@k with k samples per group (arXiv:2503.19595).

    The unbiased gradient of the expected best reward, with the leave-one-out maximum as baseline: only a single best
    sample has an advantage.

    Args:
        eps: largest spread of a group's rewards that counts as none.
    """
    best = groups.max(rewards)
    others = groups.max(rewards.masked_fill(rewards == best, -torch.inf))
    alone = groups.mean((rewards == best).to(rewards.dtype)) * groups.sizes[groups.index] < 1.5
    lead = torch.where((rewards == best) & alone & others.isfinite(), best - others, 0.0)
    return lead.masked_fill(groups.flat(rewards, eps), 0.0)


@estimator("group", needs=("greedy",), promise=Promise())
def remax(rewards: Tensor, groups: SampleGroups, greedy: Tensor) -> Tensor:
    """``r - reward of the greedy response to the same prompt`` (ReMax, arXiv:2310.10505).

    The greedy response is one more sample per prompt, at temperature 0. It is rewarded and never trained.
    """
    return rewards - greedy


@estimator("group", promise=Promise())
def pass_through(rewards: Tensor, groups: SampleGroups) -> Tensor:
    """``r`` (REINFORCE without baseline: Williams 1992)."""
    return rewards


@estimator("batch", promise=NORMALIZED_PAIRS)
def reinforce_pp(rewards: Tensor, groups: SampleGroups, *, eps: float = 1e-6, ddof: int = 1) -> Tensor:
    """``(r - mean) / std`` over the batch (REINFORCE++, arXiv:2501.03262, section 3).

    Args:
        eps: largest spread of the rewards that counts as none.
        ddof: 1: sample standard deviation; 0: population.
    """
    return grpo(rewards, SampleGroups.all_in_one(rewards), eps=eps, ddof=ddof)


@estimator("batch", promise=NORMALIZED_PAIRS)
def reinforce_pp_baseline(rewards: Tensor, groups: SampleGroups, *, eps: float = 1e-6, ddof: int = 1) -> Tensor:
    """``(r - mean_g) / std over the batch`` (REINFORCE++ with baseline, arXiv:2501.03262, section 3).

    Args:
        eps: largest spread of rewards that counts as none.
        ddof: 1: sample standard deviation; 0: population.
    """
    centred = mean_only(rewards, groups, eps=eps)
    if float(centred.max() - centred.min()) <= eps:
        return torch.zeros_like(centred)
    # The batch mean of group-centred rewards is 0. Not subtracting its rounding noise keeps flat groups at exactly 0.
    return centred / SampleGroups.all_in_one(centred).std(centred, ddof)


@estimator("batch", promise=CENTRED_PAIRS)
def gpg(rewards: Tensor, groups: SampleGroups, *, eps: float = 1e-6) -> Tensor:
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
    rewards: Tensor, groups: SampleGroups, functions: Tensor, weights: Tensor, *, eps: float = 1e-6, ddof: int = 1
) -> Tensor:
    """``grpo`` of each reward function, weighted and summed, then normalized over the batch (GDPO, arXiv:2601.05242).

    A function with a large spread does not drown out the others.

    Args:
        eps: largest spread of rewards that counts as none.
        ddof: 1: sample standard deviation; 0: population.
    """
    each = [grpo(column, groups, eps=eps, ddof=ddof) for column in functions.unbind(dim=1)]
    return reinforce_pp(torch.stack(each, dim=1) @ weights, groups, eps=eps, ddof=ddof)


def returns(rewards: Tensor, lengths: Tensor, gamma: float) -> Tensor:
    """Return (E,) discounted sums of each turn's own and later rewards."""
    found, at = rewards.clone(), 0
    for length in lengths.tolist():
        for turn in range(at + length - 2, at - 1, -1):
            found[turn] += gamma * found[turn + 1]
        at += length
    return found


@estimator("group", level="turn", promise=Promise())
def turn_rloo(rewards: Tensor, groups: SampleGroups, lengths: Tensor, *, gamma: float = 1.0) -> Tensor:
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
def turn_index_mean(rewards: Tensor, groups: SampleGroups, lengths: Tensor, *, gamma: float = 1.0) -> Tensor:
    """``G_k - mean of G_k over the group's samples with a turn k``: biased towards ending early or late, as several
    published multi-turn versions of GRPO are.

    Args:
        gamma: discount per turn.
    """
    to_go = returns(rewards, lengths, gamma)
    turns = torch.arange(len(to_go)) - (lengths.cumsum(0) - lengths).repeat_interleave(lengths)
    width = int(lengths.max()) if len(lengths) else 0
    return to_go - SampleGroups(groups.index.repeat_interleave(lengths) * width + turns).mean(to_go)


_LEAST_ENERGY = 1e-12
"""Weight of a path without energy, such as a path of certain tokens. For a group of them, the baseline is the mean."""


@estimator("group", level="token", needs=("logprobs",), promise=Promise())
def optimal_token_baseline(rewards: Tensor, groups: SampleGroups, lengths: Tensor, logprobs: Tensor) -> Tensor:
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
    rewards: Tensor, groups: SampleGroups, lengths: Tensor, values: Tensor, *, gamma: float = 1.0, lam: float = 0.95
) -> Tensor:
    """Generalized advantage estimation with the critic's values (arXiv:1506.02438, eq. 16).

    The state after a turn's last token is the first state of the next turn, whatever was observed between them.

    Args:
        gamma: discount per sampled token.
        lam: trace decay per sampled token.
    """
    every, none = torch.ones_like(rewards, dtype=torch.bool), rewards.new_zeros(len(lengths))
    advantages: Tensor = load_option("gae")(none, values, every, lengths, gamma, lam, token_rewards=rewards)[0]
    return advantages
