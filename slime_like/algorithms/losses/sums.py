"""The metrics of a step as sums, so that micro-batches and ranks can be added up."""

import math
from dataclasses import dataclass, fields
from typing import Self

import torch
from torch import Tensor

from slime_like.statistics import GRPOStats

_MAXIMA = ("old_gap_max", "engine_gap_max")


@dataclass(slots=True)
class LossSums:
    """Metric sums, as detached float64 scalars.

    Attributes:
        loss, policy_loss, kl_loss: weighted sums; divided by the step's denominator, the means of ``GRPOStats``.
        ratio, clipped, bounded, approx_policy_kl, entropy, engine_gap, importance_weight, importance_clipped: sums over
            loss-carrying tokens.
        num_tokens: number of loss-carrying tokens.
        old_gap_max, engine_gap_max: maxima over loss-carrying tokens.
    """

    loss: Tensor
    policy_loss: Tensor
    kl_loss: Tensor
    ratio: Tensor
    clipped: Tensor
    bounded: Tensor
    approx_policy_kl: Tensor
    entropy: Tensor
    engine_gap: Tensor
    importance_weight: Tensor
    importance_clipped: Tensor
    num_tokens: Tensor
    old_gap_max: Tensor
    engine_gap_max: Tensor

    @classmethod
    def zeros(cls, device: torch.device | str = "cpu") -> Self:
        """Return all zeros."""
        return cls(*(torch.zeros((), dtype=torch.float64, device=device) for _ in fields(cls)))

    def add(self, other: Self) -> Self:
        """Return the sums of both, with the maxima of both."""
        sums, maxima = self.to_vectors()
        other_sums, other_maxima = other.to_vectors()
        return self.from_vectors(sums + other_sums, torch.maximum(maxima, other_maxima))

    def to_vectors(self) -> tuple[Tensor, Tensor]:
        """Return two float64 vectors, one to all-reduce with a sum and one with a maximum."""
        return (
            torch.stack([getattr(self, name) for name in _sum_names()]),
            torch.stack([getattr(self, name) for name in _MAXIMA]),
        )

    @classmethod
    def from_vectors(cls, sums: Tensor, maxima: Tensor) -> Self:
        """Return the sums that ``to_vectors`` made these vectors of."""
        values = dict(zip(_sum_names(), sums.unbind(), strict=True))
        return cls(**values, **dict(zip(_MAXIMA, maxima.unbind(), strict=True)))

    def to_stats(self, denominator: float, grad_norm: Tensor | float, learning_rate: float) -> GRPOStats:
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
        if not 0 < denominator < math.inf:
            raise ValueError(
                f"denominator={denominator}: not positive and finite; use the result of `step_denominator`"
            )
        tokens = self.num_tokens.clamp_min(1)
        return GRPOStats(
            loss=self.loss / denominator,
            policy_loss=self.policy_loss / denominator,
            kl_loss=self.kl_loss / denominator,
            ratios=self.ratio / tokens,
            clipfrac=self.clipped / tokens,
            bounded_fraction=self.bounded / tokens,
            approx_policy_kls=self.approx_policy_kl / tokens,
            entropy=self.entropy / tokens,
            old_gap_max=self.old_gap_max,
            engine_gap_mean=self.engine_gap / tokens,
            engine_gap_max=self.engine_gap_max,
            grad_norm=torch.as_tensor(grad_norm, dtype=torch.float64),
            learning_rate=torch.tensor(learning_rate, dtype=torch.float64),
            num_tokens=self.num_tokens,
            importance_weight=self.importance_weight / tokens,
            importance_clipfrac=self.importance_clipped / tokens,
        )


@dataclass(slots=True)
class LossOutput:
    """``loss``: scalar with graph, ``sum(token_weights * per_token_loss)``, undivided. ``sums``: detached metrics."""

    loss: Tensor
    sums: LossSums


def _sum_names() -> list[str]:
    return [field.name for field in fields(LossSums) if field.name not in _MAXIMA]
