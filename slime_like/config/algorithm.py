"""The RL objective."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from slime_like.config.base import Section


class AlgorithmConfig(Section):
    """Loss, advantages, reduction."""

    loss: str = Field(
        "ppo_clip", description="Loss name: ppo_clip, policy_gradient, sft, ... or `package.module:name`."
    )
    advantage: str = Field(
        "grpo", description="Advantage estimator: grpo, grpo_mean_only, dr_grpo, rloo, ... or import path."
    )
    reduction: Literal["tokens", "samples", "groups"] = Field(
        "tokens",
        description="What the loss is a mean of, over the whole optimizer step: all tokens; per-sample means; "
        "per-group token means.",
    )
    clip_low: float = Field(0.2, ge=0, lt=1, description="Ratios below 1 - clip_low are clipped.")
    clip_high: float = Field(0.2, ge=0, description="Ratios above 1 + clip_high are clipped.")
    dual_clip: float | None = Field(None, gt=1, description="Dual-clip bound for negative advantages; none is off.")
    kl_coef: float = Field(
        0.0, ge=0, description="Coefficient of the KL term against the reference; 0 loads no reference."
    )
    kl_estimator: Literal["k2", "k3"] = Field(
        "k3",
        description="Estimator of KL(policy || reference) in the loss. k2 has the exact reverse-KL gradient; k3 is biased.",
    )
    entropy_coef: float = Field(0.0, ge=0, description="Coefficient of the entropy bonus.")
    epochs: int = Field(1, ge=1, description="Passes over one batch (ppo_epochs).")
    minibatches: int = Field(1, ge=1, description="Optimizer steps per pass.")
    advantage_eps: float = Field(1e-6, ge=0, description="Groups whose reward spread is at most this have advantage 0.")
