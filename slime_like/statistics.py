"""Metrics of an optimizer step, and pass@k: the probability that at least one of k samples succeeds."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import comb
from typing import Any

import torch
from torch import Tensor

from slime_like.trajectory import TensorsAsArrays


@dataclass(slots=True)
class GRPOStats(TensorsAsArrays):
    """Metrics of one optimizer step over every rank, as described in ``docs/metrics.md``.

    Attributes:
        source_kls: ``distillation_kl`` over the tokens of each source with its own teacher.
        metadata: debug data, e.g. ``pi_logprobs`` (total_response_tokens,).
    """

    loss: Tensor
    policy_loss: Tensor
    kl_loss: Tensor
    ratios: Tensor
    clipfrac: Tensor
    approx_policy_kls: Tensor
    entropy: Tensor
    old_gap_max: Tensor
    engine_gap_mean: Tensor
    engine_gap_max: Tensor
    grad_norm: Tensor
    learning_rate: Tensor
    num_tokens: Tensor
    importance_weight: Tensor = field(default_factory=lambda: torch.zeros(()))
    importance_clipfrac: Tensor = field(default_factory=lambda: torch.zeros(()))
    importance_ess: Tensor = field(default_factory=lambda: torch.zeros(()))
    engine_chi_square: Tensor = field(default_factory=lambda: torch.zeros(()))
    perplexity: Tensor = field(default_factory=lambda: torch.zeros(()))
    engine_perplexity: Tensor = field(default_factory=lambda: torch.zeros(()))
    rejected_fraction: Tensor = field(default_factory=lambda: torch.zeros(()))
    bounded_fraction: Tensor = field(default_factory=lambda: torch.zeros(()))
    distillation_kl: Tensor = field(default_factory=lambda: torch.zeros(()))
    moe_aux_loss: Tensor = field(default_factory=lambda: torch.zeros(()))
    router_load_max: Tensor = field(default_factory=lambda: torch.zeros(()))
    routing_disagreement: Tensor = field(default_factory=lambda: torch.zeros(()))
    source_kls: dict[str, float] = field(default_factory=dict)
    metadata: dict[str, Any] | None = field(default=None)


@dataclass(slots=True)
class ValueStats(TensorsAsArrays):
    """Metrics of a value model's optimizer step over every rank, as described in ``docs/metrics.md``."""

    loss: Tensor
    explained_variance: Tensor
    values: Tensor
    returns: Tensor
    clipfrac: Tensor
    old_gap_max: Tensor
    grad_norm: Tensor
    learning_rate: Tensor
    num_tokens: Tensor
    moe_aux_loss: Tensor = field(default_factory=lambda: torch.zeros(()))


StepStats = GRPOStats | ValueStats
"""Metrics of a policy's step, or of a value model's."""


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Estimate pass@k of one prompt, unbiased: ``1 - C(n - c, k) / C(n, k)`` (Chen et al., arXiv:2107.03374, eq. 1).

    Args:
        num_samples: n, the number of samples.
        num_correct: c, the number of successes.
        k: at most n.

    Raises:
        ValueError: k is not in 1 to n, or c not in 0 to n.

    Example:
        >>> pass_at_k(num_samples=4, num_correct=1, k=2)
        0.5
    """
    if not 1 <= k <= num_samples or not 0 <= num_correct <= num_samples:
        raise ValueError(f"pass@{k} of {num_correct} successes in {num_samples} samples; k is 1 to {num_samples}")
    return 1.0 - comb(num_samples - num_correct, k) / comb(num_samples, k)


def mean_pass_at_k(successes: Sequence[Sequence[bool]], k: int) -> float:
    """Average ``pass_at_k`` over prompts.

    Args:
        successes: one row per prompt, one entry per sample; rows may differ in length.
        k: at most the number of samples of every row.

    Raises:
        ValueError: there is no prompt, or as in ``pass_at_k``.
    """
    if not successes:
        raise ValueError("successes=[]: no prompt to average over; give at least one row")
    return sum(pass_at_k(len(row), sum(row), k) for row in successes) / len(successes)


def powers_up_to(num_samples: int) -> list[int]:
    """Return the values of k to report: powers of two above 1 and below n, and n itself. None for n = 1."""
    powers = [2**i for i in range(1, num_samples.bit_length()) if 2**i < num_samples]
    return [*powers, num_samples] if num_samples > 1 else []
