"""Reduction of per-token losses to one number: ``loss = sum(token_weight * per_token_loss) / denominator``.

The weight depends on a sample and its completed group, the denominator on the whole optimizer step. So the number of
micro-batches and the parallel layout can't affect the result. A sample is a rollout: all its rows count as one sample.

=========  =====================================  ==========================================
reduction  token weight                           denominator
=========  =====================================  ==========================================
tokens     1                                      loss-carrying tokens of the step (DAPO, arXiv:2503.14476 eq. 8)
samples    1 / loss-carrying tokens of sample     samples that carry loss (GRPO, arXiv:2402.03300 eq. 3)
groups     1 / loss-carrying tokens of group      groups that carry loss
constant   1 / a fixed length                     samples that carry loss (Dr. GRPO, arXiv:2503.20783)
=========  =====================================  ==========================================
"""

import math
from collections import Counter
from collections.abc import Sequence
from operator import index
from typing import Any, NamedTuple

import torch
from torch import Tensor

from slime_like.algorithms.promise import Promise
from slime_like.algorithms.segments import segment_sum
from slime_like.plugins.objective import REDUCTIONS
from slime_like.plugins.resolve import require_options, resolve_callable

Counts = Sequence[int]
RolloutIds = Sequence[int] | Sequence[str] | Tensor


class Reduction:
    """A reduction, given the loss-carrying tokens and the groups of all samples. By default, a sum over samples that
    is divided by their number."""

    promise = Promise(exact=False)

    def divisors(self, counts: Counts, group_ids: Sequence[int]) -> list[float]:
        """Return 1 / token weight of each sample."""
        return [1.0] * len(counts)

    def denominator(self, counts: Counts, group_ids: Sequence[int]) -> float:
        """Return the divisor of a whole step's sum."""
        return float(sum(count > 0 for count in counts))


class TokenMean(Reduction):
    """Mean over the step's tokens (DAPO, arXiv:2503.14476, eq. 8)."""

    def denominator(self, counts: Counts, group_ids: Sequence[int]) -> float:
        return float(sum(counts))


class SampleMean(Reduction):
    """Mean per sample, then over samples (GRPO, arXiv:2402.03300, eq. 3)."""

    def divisors(self, counts: Counts, group_ids: Sequence[int]) -> list[float]:
        return [float(count) for count in counts]


class GroupMean(Reduction):
    """Mean per group's tokens, then over groups (DAPO's eq. 8 to the letter)."""

    def divisors(self, counts: Counts, group_ids: Sequence[int]) -> list[float]:
        per_group = _tokens_per_group(counts, group_ids)
        return [float(per_group[group]) for group in group_ids]

    def denominator(self, counts: Counts, group_ids: Sequence[int]) -> float:
        return float(sum(count > 0 for count in _tokens_per_group(counts, group_ids).values()))


class ConstantLength(Reduction):
    """Sum per sample over a fixed length, then mean over samples (Dr. GRPO, arXiv:2503.20783, section 3.2).

    Attributes:
        length: the divisor, usually the response limit.
    """

    def __init__(self, length: float) -> None:
        if not 0 < length < math.inf:
            raise ValueError(f"length={length} must be above 0 and finite; give the response limit")
        self.length, self.promise = length, Promise(scale=lambda samples: 1 / length)

    def divisors(self, counts: Counts, group_ids: Sequence[int]) -> list[float]:
        return [float(self.length)] * len(counts)


def token_weights(
    reduction: str,
    loss_token_counts: Sequence[int] | Tensor,
    group_ids: Sequence[int] | Tensor,
    rollout_ids: RolloutIds | None = None,
    **options: Any,
) -> list[float]:
    """Compute the weight of every loss-carrying token of each row.

    Args:
        reduction: tokens, samples, groups or constant.
        loss_token_counts: loss-carrying tokens of each row.
        group_ids: each row's group; give all rows of a group together.
        rollout_ids: each row's rollout, unique over all groups; by default every row is a rollout.
        options: of the reduction.

    Returns:
        One weight per row; 0 for a row without loss-carrying tokens.

    Raises:
        TypeError: a count, a group or a rollout isn't an integer.
        ValueError: the reduction is unknown or does not take the options, lengths differ, or a rollout has rows in
            several groups.

    Example:
        >>> token_weights("samples", [4, 0, 2], group_ids=[1, 1, 2])
        [0.25, 0.0, 0.5]
        >>> token_weights("samples", [3, 1, 2], group_ids=[1, 1, 2], rollout_ids=["1-0", "1-0", "2-0"])
        [0.25, 0.25, 0.5]
    """
    rows = _checked(loss_token_counts, group_ids, rollout_ids)
    divisors = build_reduction(reduction, **options).divisors(rows.totals, rows.groups)
    return [1.0 / divisors[at] if count else 0.0 for at, count in zip(rows.rollouts, rows.counts, strict=True)]


def step_denominator(
    reduction: str,
    loss_token_counts: Sequence[int] | Tensor,
    group_ids: Sequence[int] | Tensor,
    rollout_ids: RolloutIds | None = None,
    **options: Any,
) -> float:
    """Return the divisor of one optimizer step's weighted sum.

    Args:
        reduction: tokens, samples, groups or constant.
        loss_token_counts, group_ids, rollout_ids, options: as in ``token_weights``, for every row of the step on all
            ranks.

    Returns:
        The number of tokens, samples (rollouts) or groups that carry loss.

    Raises:
        ValueError: nothing in the step carries loss, or as in ``token_weights``.

    Example:
        >>> step_denominator("samples", [4, 0, 2], group_ids=[1, 1, 2])
        2.0
    """
    rows = _checked(loss_token_counts, group_ids, rollout_ids)
    if not any(rows.counts):
        raise ValueError(
            f"no token of the step's {len(rows.counts)} samples carries loss; skip the step or check the masks"
        )
    return build_reduction(reduction, **options).denominator(rows.totals, rows.groups)


def build_reduction(name: str, **options: Any) -> Reduction:
    """Build the reduction with this name, a key of ``REDUCTIONS``. Raises ``ValueError`` as ``token_weights``."""
    made = resolve_callable("reduction", name, REDUCTIONS)
    require_options(f"reduction {name}", made, options)
    reduction: Reduction = made(**options)
    return reduction


def sum_of_sample_mean(
    x: Tensor, response_lengths: Sequence[int] | Tensor, loss_masks: Sequence[Tensor] | Tensor
) -> Tensor:
    """Sum each sample's masked mean over the samples. A fully masked sample adds 0.

    Args:
        x: (R,) per-token values of all samples, end to end.
        response_lengths: tokens of each sample.
        loss_masks: (R,) of a pack, or one of (response_len,) per sample; bool or numbers.

    Returns:
        Scalar, differentiable with respect to ``x``, float32 at least. With bool masks, values on masked tokens (inf
        and nan too) have no effect.

    Raises:
        ValueError: lengths don't add up to R, or masks have other lengths.

    Example:
        >>> sum_of_sample_mean(torch.tensor([1.0, 3.0, 5.0]), [2, 1], [torch.ones(2), torch.ones(1)])
        tensor(7.)
    """
    lengths = response_lengths.tolist() if isinstance(response_lengths, Tensor) else list(response_lengths)
    masks = [loss_masks] if isinstance(loss_masks, Tensor) else list(loss_masks)
    expected = [sum(lengths)] if isinstance(loss_masks, Tensor) else lengths
    if sum(lengths) != x.numel() or [mask.numel() for mask in masks] != expected:
        raise ValueError(
            f"x has {x.numel()} values, response_lengths add up to {sum(lengths)}; every mask needs its sample's length"
        )
    if not lengths:
        return x.sum()
    # A bfloat16 sum of ones never gets beyond 256.
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    mask = torch.cat(masks)
    kept = torch.where(mask, x, 0.0) if mask.dtype == torch.bool else x * mask.to(x.dtype)
    segments = torch.tensor(lengths, device=x.device)
    return (segment_sum(kept, segments) / segment_sum(mask.to(x.dtype), segments).clamp_min(1)).sum()


class _Rows(NamedTuple):
    """``counts``: loss-carrying tokens of each row. ``rollouts``: index of each row's rollout, in order of appearance.
    ``totals``, ``groups``: loss-carrying tokens and group of each rollout."""

    counts: list[int]
    rollouts: list[int]
    totals: list[int]
    groups: list[int]


def _checked(
    loss_token_counts: Sequence[int] | Tensor, group_ids: Sequence[int] | Tensor, rollout_ids: RolloutIds | None
) -> _Rows:
    if len(loss_token_counts) != len(group_ids):
        raise ValueError(
            f"{len(loss_token_counts)} token counts but {len(group_ids)} group ids; give one of each per sample"
        )
    counts, groups = list(map(index, _listed(loss_token_counts))), list(map(index, _listed(group_ids)))
    ids = range(len(counts)) if rollout_ids is None else _listed(rollout_ids)
    ids = [each if isinstance(each, str) else index(each) for each in ids]
    if len(ids) != len(counts):
        raise ValueError(f"{len(counts)} token counts but {len(ids)} rollout ids; give one of each per row")
    places: dict[int | str, int] = {}
    rows = _Rows(counts, [], [], [])
    for row, (count, group, rollout) in enumerate(zip(counts, groups, ids, strict=True)):
        at = places.setdefault(rollout, len(places))
        if at == len(rows.totals):
            rows.totals.append(0)
            rows.groups.append(group)
        if rows.groups[at] != group:
            raise ValueError(
                f"row {row} of rollout {rollout!r} is in group {group}, another of its rows in {rows.groups[at]}; give "
                "rollout ids that are unique over all groups"
            )
        rows.totals[at] += count
        rows.rollouts.append(at)
    return rows


def _listed(values: RolloutIds) -> Sequence[Any]:
    """Convert to Python numbers, since tensors do not compare equal as keys."""
    return values.tolist() if isinstance(values, Tensor) else values


def _tokens_per_group(counts: Sequence[int], group_ids: Sequence[int]) -> Counter[int]:
    totals: Counter[int] = Counter()
    for group, count in zip(group_ids, counts, strict=True):
        totals[group] += count
    return totals
