"""The metrics of a step as sums, so that micro-batches and ranks can be added up."""

import math
from dataclasses import dataclass, fields
from typing import ClassVar, NamedTuple, Self

import torch
from torch import Tensor

from slime_like.statistics import GRPOStats, StepStats, ValueStats

_TINY = torch.finfo(torch.float64).tiny
_LEAST_VARIANCE = 1e-12
"""Variance below which returns are equal up to rounding, so nothing can be explained."""


@dataclass(slots=True)
class Sums:
    """Metric sums, as detached float64 scalars. Subclasses name some of them as maxima instead."""

    _maxima: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def zeros(cls, device: torch.device | str = "cpu") -> Self:
        return cls(*(torch.zeros((), dtype=torch.float64, device=device) for _ in fields(cls)))

    def add(self, other: Self) -> Self:
        sums, maxima = self.to_vectors()
        other_sums, other_maxima = other.to_vectors()
        return self.from_vectors(sums + other_sums, torch.maximum(maxima, other_maxima))

    def to_vectors(self) -> tuple[Tensor, Tensor]:
        """Return two float64 vectors, one to all-reduce with a sum and one with a maximum."""
        return (
            torch.stack([getattr(self, name) for name in self._sums()]),
            torch.stack([getattr(self, name) for name in self._maxima]),
        )

    @classmethod
    def from_vectors(cls, sums: Tensor, maxima: Tensor) -> Self:
        """Return the sums that ``to_vectors`` made these vectors of."""
        names = (*cls._sums(), *cls._maxima)
        return cls(**dict(zip(names, (*sums.unbind(), *maxima.unbind()), strict=True)))

    def to_stats(self, denominator: float, grad_norm: Tensor | float, learning_rate: float) -> StepStats:
        """Divide weighted sums by ``denominator`` and token sums by the number of loss-carrying tokens.

        Args:
            denominator: result of ``step_denominator`` for the step.
            grad_norm: global gradient norm before clipping.
            learning_rate: learning rate of the step.

        Returns:
            Float64 scalars; 0 for metrics that no micro-batch measured.

        Raises:
            ValueError: the denominator isn't positive and finite.
        """
        raise NotImplementedError

    @classmethod
    def _sums(cls) -> list[str]:
        return [field.name for field in fields(cls) if field.name not in cls._maxima]


@dataclass(slots=True)
class LossSums(Sums):
    """Sums of a policy's step.

    Attributes:
        loss, policy_loss, kl_loss: weighted sums; divided by the step's denominator, the means of ``GRPOStats``.
        ratio, clipped, bounded, approx_policy_kl, divergence, entropy, engine_gap, importance_weight,
            importance_clipped, squared_weight, squared_engine_ratio, surprisal, engine_surprisal: sums over
            loss-carrying tokens.
        num_tokens, rejected: loss-carrying tokens, and tokens of rejected sequences, which do not count otherwise.
        old_gap_max, engine_gap_max: maxima over loss-carrying tokens.
    """

    loss: Tensor
    policy_loss: Tensor
    kl_loss: Tensor
    ratio: Tensor
    clipped: Tensor
    bounded: Tensor
    approx_policy_kl: Tensor
    divergence: Tensor
    entropy: Tensor
    engine_gap: Tensor
    importance_weight: Tensor
    importance_clipped: Tensor
    squared_weight: Tensor
    squared_engine_ratio: Tensor
    surprisal: Tensor
    engine_surprisal: Tensor
    num_tokens: Tensor
    rejected: Tensor
    old_gap_max: Tensor
    engine_gap_max: Tensor

    _maxima = ("old_gap_max", "engine_gap_max")

    def to_stats(self, denominator: float, grad_norm: Tensor | float, learning_rate: float) -> GRPOStats:
        _require_positive(denominator)
        tokens = self.num_tokens.clamp_min(1)
        return GRPOStats(
            loss=self.loss / denominator,
            policy_loss=self.policy_loss / denominator,
            kl_loss=self.kl_loss / denominator,
            ratios=self.ratio / tokens,
            clipfrac=self.clipped / tokens,
            bounded_fraction=self.bounded / tokens,
            approx_policy_kls=self.approx_policy_kl / tokens,
            distillation_kl=self.divergence / tokens,
            entropy=self.entropy / tokens,
            old_gap_max=self.old_gap_max,
            engine_gap_mean=self.engine_gap / tokens,
            engine_gap_max=self.engine_gap_max,
            grad_norm=torch.as_tensor(grad_norm, dtype=torch.float64),
            learning_rate=torch.tensor(learning_rate, dtype=torch.float64),
            num_tokens=self.num_tokens,
            importance_weight=self.importance_weight / tokens,
            importance_clipfrac=self.importance_clipped / tokens,
            importance_ess=self.importance_weight.square() / (tokens * self.squared_weight.clamp_min(_TINY)),
            engine_chi_square=torch.where(self.squared_engine_ratio > 0, self.squared_engine_ratio / tokens - 1, 0.0),
            perplexity=(self.surprisal / tokens).exp(),
            engine_perplexity=(self.engine_surprisal / tokens).exp(),
            rejected_fraction=self.rejected / (self.num_tokens + self.rejected).clamp_min(1),
        )


class LossOutput(NamedTuple):
    """``loss``: scalar with graph, ``sum(token_weights * per_token_loss)``, undivided. ``sums``: detached metrics."""

    loss: Tensor
    sums: LossSums


@dataclass(slots=True)
class ValueSums(Sums):
    """Sums of a value model's step.

    Attributes:
        loss: weighted sum.
        value, returns, squared_returns, error, squared_error, clipped, num_tokens: sums over loss-carrying tokens;
            ``error`` is the return minus the value.
        old_gap_max: maximum over loss-carrying tokens.
    """

    loss: Tensor
    value: Tensor
    returns: Tensor
    squared_returns: Tensor
    error: Tensor
    squared_error: Tensor
    clipped: Tensor
    num_tokens: Tensor
    old_gap_max: Tensor

    _maxima = ("old_gap_max",)

    def to_stats(self, denominator: float, grad_norm: Tensor | float, learning_rate: float) -> ValueStats:
        _require_positive(denominator)
        tokens = self.num_tokens.clamp_min(1)
        of_returns = self.squared_returns / tokens - (self.returns / tokens).square()
        unexplained = self.squared_error / tokens - (self.error / tokens).square()
        return ValueStats(
            loss=self.loss / denominator,
            explained_variance=torch.where(of_returns > _LEAST_VARIANCE, 1 - unexplained / of_returns, 0.0),
            values=self.value / tokens,
            returns=self.returns / tokens,
            clipfrac=self.clipped / tokens,
            old_gap_max=self.old_gap_max,
            grad_norm=torch.as_tensor(grad_norm, dtype=torch.float64),
            learning_rate=torch.tensor(learning_rate, dtype=torch.float64),
            num_tokens=self.num_tokens,
        )


def _require_positive(denominator: float) -> None:
    if not 0 < denominator < math.inf:
        raise ValueError(f"denominator={denominator}: not positive and finite; use the result of `step_denominator`")
