"""Estimators that compare the samples of a group."""

import torch
from torch import Tensor

from slime_like.algorithms.advantages import Groups, estimator
from slime_like.algorithms.promise import CENTRED, CENTRED_PAIRS, NORMALIZED_PAIRS, Promise


@estimator("group", promise=NORMALIZED_PAIRS)
def grpo(rewards: Tensor, groups: Groups, *, eps: float = 1e-6, ddof: int = 1) -> Tensor:
    """``(r - mean_g) / std_g`` (DeepSeekMath, arXiv:2402.03300, section 4.1.2).

    Args:
        eps: largest spread of a group's rewards that counts as none.
        ddof: 1: sample standard deviation; 0: population.
    """
    flat = groups.flat(rewards, eps)
    spread = groups.std(rewards, ddof).masked_fill(flat, 1.0)
    return ((rewards - groups.mean(rewards)) / spread).masked_fill(flat, 0.0)


@estimator("group", promise=CENTRED)
def mean_only(rewards: Tensor, groups: Groups, *, eps: float = 1e-6) -> Tensor:
    """``r - mean_g`` (Dr. GRPO, arXiv:2503.20783, section 3.2, with reduction "constant").

    Args:
        eps: largest spread of a group's rewards that counts as none.
    """
    return (rewards - groups.mean(rewards)).masked_fill(groups.flat(rewards, eps), 0.0)


@estimator("group", promise=Promise())
def rloo(rewards: Tensor, groups: Groups, *, eps: float = 1e-6) -> Tensor:
    """``r - mean of the group's other samples`` (arXiv:2402.14740, eq. 9).

    Args:
        eps: largest spread of a group's rewards that counts as none.
    """
    # r - (n mean - r) / (n - 1) = n / (n - 1) * (r - mean)
    sizes = groups.sizes[groups.index]
    return mean_only(rewards, groups, eps=eps) * sizes / (sizes - 1).clamp_min(1)


@estimator("group", needs=("tokens",), promise=CENTRED_PAIRS)
def opo(rewards: Tensor, groups: Groups, tokens: Tensor, *, eps: float = 1e-6) -> Tensor:
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
def pass_at_k(rewards: Tensor, groups: Groups, *, eps: float = 1e-6) -> Tensor:
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
def remax(rewards: Tensor, groups: Groups, greedy: Tensor) -> Tensor:
    """``r - reward of the greedy response to the same prompt`` (ReMax, arXiv:2310.10505).

    The greedy response is one more sample per prompt, at temperature 0. It is rewarded and never trained.
    """
    return rewards - greedy


@estimator("group", promise=Promise())
def pass_through(rewards: Tensor, groups: Groups) -> Tensor:
    """``r`` (REINFORCE without baseline: Williams 1992)."""
    return rewards
