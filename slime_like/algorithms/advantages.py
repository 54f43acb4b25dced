"""Advantages from rewards. Groups are identified by id, never by position, and may be uneven.

Every estimator computes in float64. If the rewards of a group lie within ``eps`` of each other, as in a group of one,
their advantages are exactly 0 instead of rounding noise divided by rounding noise.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self, get_args

import torch
from torch import Tensor

from slime_like.algorithms.losses.kl import KLEstimator, kl_estimate
from slime_like.algorithms.promise import NOTHING, Promise
from slime_like.algorithms.segments import require_alike, require_bool_mask, require_lengths, segment_sum
from slime_like.plugins.objective import ADVANTAGES
from slime_like.plugins.resolve import require_options, resolve

Scope = Literal["group", "batch"]
Level = Literal["sample", "turn", "token"]
Need = Literal["tokens", "functions", "weights", "greedy", "logprobs", "values"]


@dataclass(frozen=True, slots=True)
class AdvantageEstimator:
    """An estimator of advantages.

    Attributes:
        compute: ``(rewards (E,) float64, groups, **options) -> (E,)``, an entry per sample. Of a lower level:
            ``(rewards, groups, lengths, **options)`` with an entry per turn or token that carries loss, and (N,)
            ``lengths``, the entries of each sample. An environment's rewards are at the turns that earned them, and the
            rest of a sample's reward at its last entry.
        scope: "group" if completed groups suffice, "batch" if the whole batch is needed, which rules out streaming.
        level: "sample", "turn" or "token": the unit with one advantage, which is spread over its tokens.
        needs: further arguments of ``compute``: "tokens", (N,) loss-carrying tokens of each sample; "functions" (N, F)
            and "weights" (F,), the unweighted rewards of each function, and their weights; "greedy", (N,) reward of the
            greedy response to each sample's prompt, which is then sampled; "logprobs" and "values", (E,) under the
            policy that sampled, and of the critic, for every token that carries loss.
        promise: its expected gradient.

    Raises:
        ValueError: an unknown scope or level.
    """

    compute: Callable[..., Tensor]
    scope: Scope
    level: Level = "sample"
    needs: tuple[Need, ...] = ()
    promise: Promise = NOTHING

    def __post_init__(self) -> None:
        for name, known in (("scope", get_args(Scope)), ("level", get_args(Level))):
            if getattr(self, name) not in known:
                problem = f"{name}={getattr(self, name)!r}: unknown for an advantage estimator"
                raise ValueError(f"{problem}; use {' or '.join(map(repr, known))}")

    def __call__(self, rewards: Tensor, groups: SampleGroups, *needed: Tensor, **options: Any) -> Tensor:
        return self.compute(rewards, groups, *needed, **options)


def estimator(
    scope: Scope, level: Level = "sample", needs: tuple[Need, ...] = (), promise: Promise = NOTHING
) -> Callable[[Callable[..., Tensor]], AdvantageEstimator]:

    def made(compute: Callable[..., Tensor]) -> AdvantageEstimator:
        return AdvantageEstimator(compute, scope, level, needs, promise)

    return made


class SampleGroups:
    """Statistics of (N,) values per group of samples.

    Args:
        group_ids: (N,) integers, in any order.
        device: device of the values; by default the device of ``group_ids``.

    Raises:
        ValueError: ids that aren't integers.

    Attributes:
        index: (N,) int64, each sample's group, 0 to G - 1.
        sizes: (G,) samples per group.
    """

    def __init__(self, group_ids: Sequence[int] | Tensor, device: torch.device | None = None) -> None:
        ids = group_ids if isinstance(group_ids, Tensor) else torch.tensor(list(group_ids))
        if ids.numel() and ids.is_floating_point():  # truncating 1.2 and 1.7 to 1 would merge two groups
            raise ValueError(f"group_ids are {ids.dtype}; give integers")
        _, self.index, self.sizes = torch.unique(ids.long().to(device), return_inverse=True, return_counts=True)

    def mean(self, values: Tensor) -> Tensor:
        """Return (N,) means of the samples' groups."""
        return (self._sum(values) / self.sizes)[self.index]

    def std(self, values: Tensor, ddof: int) -> Tensor:
        """Return (N,) standard deviations of the samples' groups, 0 for a group of one.

        Args:
            values: (N,).
            ddof: 1 divides by n - 1 (sample), 0 by n (population).
        """
        squares = self._sum((values - self.mean(values)).square())
        return (squares / (self.sizes - ddof).clamp_min(1)).sqrt()[self.index]

    def max(self, values: Tensor) -> Tensor:
        """Return (N,) maxima of the samples' groups."""
        zeros = values.new_zeros(self.sizes.numel())
        return zeros.scatter_reduce(0, self.index, values, "amax", include_self=False)[self.index]

    def flat(self, values: Tensor, eps: float) -> Tensor:
        """Return (N,) bool, True if the values of the sample's group all lie within ``eps`` of each other."""
        return self.max(values) + self.max(-values) <= eps

    def _sum(self, values: Tensor) -> Tensor:
        return values.new_zeros(self.sizes.numel()).index_add(0, self.index, values)

    @classmethod
    def all_in_one(cls, values: Tensor) -> Self:
        return cls(torch.zeros_like(values, dtype=torch.int64))


def compute_advantages(
    rewards: Tensor,
    group_ids: Sequence[int] | Tensor,
    estimator: str = "grpo",
    lengths: Tensor | None = None,
    given: Mapping[str, Tensor] | None = None,
    **options: Any,
) -> Tensor:
    """Compute one advantage per sample, or per turn or token if that is the estimator's level.

    Args:
        rewards: (N,) total reward of every sample.
        group_ids: (N,) integers, the group of every sample. Groups must be complete, but may be uneven and in any
            order.
        estimator: registered name or `package.module:name` of an ``AdvantageEstimator``.
        lengths: (N,) turns or tokens of every sample, which ``rewards`` has one after the other.
        given: further arguments by name, as far as the estimator ``needs`` them.
        options: of the estimator.

    Returns:
        (N,) in the dtype of ``rewards`` (float32 for integers), on their device.

    Raises:
        ValueError: an unknown estimator or option, shapes that differ, group ids that aren't integers, or advantages
            that aren't one finite number per sample.

    Example:
        >>> compute_advantages(torch.tensor([1.0, 0.0, 1.0, 1.0]), [7, 7, 9, 9])
        tensor([ 0.7071, -0.7071,  0.0000,  0.0000])
    """
    groups, found = SampleGroups(group_ids, rewards.device), find_estimator(estimator)
    entries = groups.index.numel() if lengths is None else int(lengths.sum())
    if rewards.ndim != 1 or rewards.numel() != entries:
        raise ValueError(
            f"rewards have shape {tuple(rewards.shape)}, group_ids {tuple(groups.index.shape)}; give (N,) of both"
        )
    dtype = rewards.dtype if rewards.is_floating_point() else torch.float32
    if not rewards.numel():
        return rewards.to(dtype)
    needed = {} if found.level == "sample" or lengths is None else {"lengths": lengths}
    needed |= _needed(estimator, found, given or {})
    require_options(f"advantage estimator {estimator}", found.compute, options, ("rewards", "groups", *needed))
    advantages = found.compute(rewards.double(), groups, *needed.values(), **options)
    _check_computed(estimator, advantages, rewards)
    return advantages.to(dtype)


def _needed(name: str, estimator: AdvantageEstimator, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
    if missing := [need for need in estimator.needs if need not in given]:
        raise ValueError(f"advantage estimator {name!r} needs {' and '.join(missing)}; give tensors by name in `given`")
    return {need: given[need].double() for need in estimator.needs}


def _check_computed(estimator: str, advantages: object, rewards: Tensor) -> None:
    if not isinstance(advantages, Tensor) or advantages.shape != rewards.shape:
        gave = f"shape {tuple(advantages.shape)}" if isinstance(advantages, Tensor) else type(advantages).__name__
        raise ValueError(
            f"advantage estimator {estimator!r} gave {gave} for {rewards.numel()} rewards; return a tensor (N,)"
        )
    if not bool(torch.isfinite(advantages).all()):
        where = int((~torch.isfinite(advantages)).nonzero()[0])
        raise ValueError(
            f"advantage estimator {estimator!r} gave sample {where} the advantage {float(advantages[where])}; return "
            "finite numbers, also for groups of one or without spread"
        )


def find_estimator(name: str) -> AdvantageEstimator:
    """Return the estimator with this name, a key of ``ADVANTAGES`` or `package.module:name`.

    Raises:
        ValueError: an unknown name, or an object that isn't an ``AdvantageEstimator``.
    """
    found = resolve("advantage estimator", name, ADVANTAGES)
    if not isinstance(found, AdvantageEstimator):
        raise ValueError(f"advantage estimator {name!r} declares no scope; give an AdvantageEstimator, which does")
    return found


def overlong_penalty(response_lens: Tensor, max_len: int, buffer: int, factor: float = 1.0) -> Tensor:
    """Compute DAPO's soft penalty for long responses (arXiv:2503.14476, eq. 13), to add to the reward.

    The penalty is 0 up to ``max_len - buffer`` tokens, falls linearly to ``-factor`` at ``max_len``, and stays there.

    Args:
        response_lens: (N,).
        max_len: response limit, in tokens.
        buffer: width of the linear part, in tokens, 1 to ``max_len``.
        factor: size of the largest penalty.

    Returns:
        (N,) float32, at most 0.

    Example:
        >>> overlong_penalty(torch.tensor([15, 18, 20, 25]), max_len=20, buffer=4)
        tensor([ 0.0000, -0.5000, -1.0000, -1.0000])
    """
    excess = response_lens.to(torch.float32) - (max_len - buffer)
    return factor * (-excess / buffer).clamp(-1.0, 0.0)


def kl_penalty(
    logprobs: Tensor,
    ref_logprobs: Tensor,
    loss_mask: Tensor,
    response_lens: Tensor,
    coefficient: float,
    estimator: str | KLEstimator = "k1",
) -> tuple[Tensor, Tensor]:
    """Compute the KL term for the reward instead of the loss (InstructGPT, arXiv:2203.02155, eq. 2).

    Args:
        logprobs, ref_logprobs: (R,) under the policy that sampled, and the reference.
        loss_mask: (R,) bool; masked tokens get no penalty.
        response_lens: (S,).
        coefficient: beta.
        estimator: as for ``kl_estimate``; k1 is unbiased here because no gradient flows.

    Returns:
        Penalties without graph: (R,) per token (for GAE), and (S,) their sums per sequence, computed in float64 and
        returned in float32 at least.

    Raises:
        ValueError: an unknown estimator, shapes that don't fit together, or a mask that isn't bool.
    """
    require_bool_mask(loss_mask)
    require_alike(logprobs=logprobs, ref_logprobs=ref_logprobs, loss_mask=loss_mask)
    require_lengths(response_lens, logprobs.numel())
    estimate = kl_estimate(logprobs.detach(), ref_logprobs, estimator)
    per_token = torch.where(loss_mask, -coefficient * estimate, 0.0)
    precision = torch.promote_types(per_token.dtype, torch.float32)
    return per_token, segment_sum(per_token.double(), response_lens).to(precision)
