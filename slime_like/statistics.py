"""Metrics of an optimizer step."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from slime_like.trajectory import TensorsAsArrays


@dataclass(slots=True)
class GRPOStats(TensorsAsArrays):
    """Metrics of one optimizer step, summed over every rank and divided by the step's denominators.

    Attributes:
        loss: total loss, ``sum(token_weights * per_token_loss) / denominator``.
        policy_loss, kl_loss: policy-gradient part of ``loss``; KL part before its coefficient.
        ratios, clipfrac: mean of pi_current / pi_old over loss-carrying tokens; fraction with a clipped gradient.
        approx_policy_kls: mean k3 estimate of KL(pi_current || pi_ref) over loss-carrying tokens; 0 without one.
        entropy: mean over loss-carrying tokens, in nats.
        old_gap_max: largest |current - old| logprob. The first micro-step proves with it that both mean the same.
        engine_gap_mean, engine_gap_max: |behavior - old| logprob over loss-carrying tokens.
        grad_norm, learning_rate, num_tokens: global norm before clipping; this step's rate; its loss-carrying tokens.
        importance_weight, importance_clipfrac: mean importance weight; fraction that was changed. 0 without weights.
        importance_ess: effective sample size of the importance weights, as a fraction of the loss-carrying tokens:
            ``(sum w)^2 / (n sum w^2)``; 0 without weights.
        engine_chi_square: chi-square divergence of a token's policies, ``E[(pi_old / pi_engine)^2] - 1``, estimated on
            the samples. The estimate may be negative.
        perplexity, engine_perplexity: exponential of the mean ``-log pi_old`` and ``-log pi_engine``.
        rejected_fraction: fraction of tokens that ``algorithm.rejection`` took out.
        bounded_fraction: fraction of loss-carrying tokens with a bounded logprob or log ratio.
        distillation_kl: mean exact KL(pi_current || pi_teacher) over loss-carrying tokens; 0 without one.
        moe_aux_loss: routers' balancing loss per layer and token, without its coefficient. 1 is even; 0 without one.
        router_load_max: tokens of the busiest expert over its layer's mean, largest over layers; 0 if no biases move.
        routing_disagreement: fraction of given routes, by token and layer, that the router would choose otherwise.
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
    """Metrics of a value model's optimizer step, over every rank. Means are over loss-carrying tokens.

    Attributes:
        loss: ``sum(token_weights * per_token_loss) / denominator``.
        explained_variance: ``1 - Var(returns - values) / Var(returns)``; 0 if all returns are equal.
        values, returns: means, before the update.
        clipfrac: fraction of tokens whose clipped branch is the loss.
        old_gap_max: largest |current - old| value, like ``GRPOStats.old_gap_max``.
        grad_norm, learning_rate, num_tokens, moe_aux_loss: see ``GRPOStats``.
    """

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
