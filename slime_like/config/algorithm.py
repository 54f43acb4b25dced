"""Section of the RL objective."""

from collections.abc import Iterator
from typing import Literal

from pydantic import Field, field_validator

from slime_like.config.base import Section, absolute_code

LOSSES = {
    "ppo_clip": "PPOClip",
    "policy_gradient": "PolicyGradient",
    "gspo": "GSPO",
    "cispo": "CISPO",
    "sft": "SFT",
}
"""Names and classes of ``slime_like.algorithms.losses.policy``, which imports torch."""

ADVANTAGES = {
    "grpo": "_grpo",
    "grpo_mean_only": "_mean_only",
    "dr_grpo": "_mean_only",
    "rloo": "_rloo",
    "reinforce_pp": "_reinforce_pp",
    "reinforce_pp_baseline": "_reinforce_pp_baseline",
    "pass_through": "_pass_through",
}
"""Names and functions of ``slime_like.algorithms.advantages``, which imports torch."""

SEQUENCE_LOSSES = ("gspo",)
"""Losses with one ratio per sequence."""

GROUP_ADVANTAGES = ("grpo", "grpo_mean_only", "dr_grpo", "rloo", "reinforce_pp_baseline")
"""Estimators that compare the samples of a group. With groups of one, every advantage is 0."""

BATCH_ADVANTAGES = ("reinforce_pp", "reinforce_pp_baseline")
"""Estimators that need the whole batch before the first advantage is known."""

KL_ESTIMATORS = ("k1", "k2", "k3", "low_var_kl")
CORRECTIONS = ("none", "truncate", "clip", "mask", "tis", "mis", "icepop")


class AlgorithmConfig(Section):
    """Loss, advantages and corrections."""

    loss: str = Field("ppo_clip", description="Loss: a name or custom code.")
    advantage: str = Field("grpo", description="Advantage estimator: a name or custom code.")
    reduction: Literal["tokens", "samples", "groups", "constant"] = "tokens"
    """Mean of the loss: over tokens, per-sample means, per-group token means, or per-sample sums divided by
    constant_length."""
    constant_length: int | None = Field(None, ge=1)
    """Divisor of reduction `constant`."""
    clip_low: float = Field(0.2, ge=0, le=1, description="Ratios below 1 - clip_low are clipped.")
    clip_high: float = Field(0.2, ge=0, description="Ratios above 1 + clip_high are clipped.")
    dual_clip: float | None = Field(None, gt=1, description="Dual-clip bound for negative advantages; none: off.")
    kl_coef: float = Field(0.0, ge=0, description="Coefficient of the KL to the reference in the loss.")
    kl_estimator: str = "k3"
    """KL estimator in the loss: k1, k2, k3, low_var_kl (k3, at most 10) or custom code."""
    kl_importance_weighted: bool = False
    """Multiply the KL by pi / pi_old, for an unbiased gradient."""
    entropy_coef: float = Field(0.0, ge=0, description="Coefficient of the entropy bonus.")
    moe_aux_loss_coef: float = Field(0.0, ge=0)
    """Coefficient of the experts' load-balancing loss."""
    routing_replay: Literal["none", "old", "rollout"] = "none"
    """Experts of each token in the policy's passes. none: the trainer's choice in each pass. old: its choice at the
    start of the step. rollout: the engine's choice."""
    importance_correction: str = "none"
    """Importance weights from engine to trainer: none, truncate (tis), clip, mask (mis, icepop) or custom code."""
    importance_level: Literal["token", "sequence", "geometric"] = "token"
    """Ratio per token, product over the sequence, or its geometric mean."""
    importance_low: float = Field(0.5, ge=0, description="Lower bound on ratios, except for `truncate`.")
    importance_high: float = Field(2.0, gt=0, description="Upper bound on ratios.")
    importance_veto: float | None = Field(None, gt=0)
    """Sequences that contain a ratio below this get weight 0."""
    importance_normalize: bool = False
    """Divide advantages by the batch's mean weight."""
    off_policy_mask: float | None = Field(None, ge=0)
    """Mask sequences with a negative advantage if the policy has moved by more nats per token than this."""
    kl_reward_coef: float = Field(0.0, ge=0)
    """Coefficient of the KL that is subtracted from rewards."""
    kl_reward_estimator: Literal["k1", "k2", "k3", "low_var_kl"] = "k1"
    """Estimator of the KL in the reward; k1 and k3 are unbiased."""
    overlong_buffer: int | None = Field(None, ge=1)
    """Tokens below the limit over which DAPO's overlong penalty grows."""
    overlong_factor: float = Field(1.0, gt=0, description="Largest overlong penalty.")
    epochs: int = Field(1, ge=1, description="Passes over one batch (ppo_epochs).")
    minibatches: int = Field(1, ge=1, description="Optimizer steps per pass.")
    old_logprobs: Literal["auto", "score"] = "auto"
    """score: compute old logprobs in an extra forward pass. auto: only if the update's pass cannot provide them."""
    advantage_eps: float = Field(1e-6, ge=0, description="Groups with at most this spread have advantage 0.")

    @property
    def needs_reference(self) -> bool:
        """Whether a reference model is loaded and scores every batch."""
        return self.kl_coef > 0 or self.kl_reward_coef > 0

    @property
    def scores_policy(self) -> bool:
        """Whether a pass before the first update computes old logprobs. Later updates, the KL in the reward and the
        batch's mean importance weight need them."""
        more = self.epochs * self.minibatches
        return self.old_logprobs == "score" or more > 1 or self.kl_reward_coef > 0 or self.importance_normalize

    @property
    def per_sequence(self) -> tuple[str, ...]:
        """Settings with their values that need a ratio or a mean over a whole sequence."""
        corrects = self.importance_correction != "none"
        chosen = {
            "loss": self.loss if self.loss in SEQUENCE_LOSSES else None,
            "importance_level": self.importance_level if corrects and self.importance_level != "token" else None,
            "importance_veto": self.importance_veto,
            "off_policy_mask": self.off_policy_mask,
        }
        return tuple(f"{name}={value}" for name, value in chosen.items() if value is not None)

    _absolute = field_validator("loss", "advantage", "kl_estimator", "importance_correction")(absolute_code)

    def row_conflicts(self) -> Iterator[str]:
        """Yield settings that rollouts of several rows exclude, because rows are trained separately."""
        remedies = {"loss": "use one per token, e.g. ppo_clip or cispo", "importance_level": "use token"}
        for setting in self.per_sequence:
            yield (
                f"algorithm.{setting} needs all tokens of a sequence together, but rollouts of several rows are "
                f"trained row by row; {remedies.get(setting.partition('=')[0], 'set it to none')}"
            )

    def conflicts(self) -> Iterator[str]:
        if self.kl_coef > 0 and self.kl_estimator == "k1" and not self.kl_importance_weighted:
            yield (
                f"kl_estimator=k1 has zero expected gradient in a loss (kl_coef={self.kl_coef:g}); use k2 or k3, or "
                "set kl_importance_weighted: true"
            )
        if (self.reduction == "constant") != (self.constant_length is not None):
            length = "none" if self.constant_length is None else self.constant_length
            yield f"reduction={self.reduction}: constant_length={length} must be set for `constant`, and only for it"
        for name, value in (("veto", self.importance_veto), ("normalize", self.importance_normalize or None)):
            if self.importance_correction == "none" and value is not None:
                yield (
                    f"importance_{name}={str(value).lower()} needs importance weights, but importance_correction=none; "
                    "set it, e.g. to truncate"
                )
        if self.routing_replay == "old" and self.epochs * self.minibatches == 1:
            yield (
                "routing_replay=old repeats the routes of the step's start in later updates, but epochs=1 and "
                "minibatches=1 make only one; use none or rollout"
            )
        if self.routing_replay != "none" and self.loss == "sft":
            yield f"routing_replay={self.routing_replay} needs sampled responses, but loss=sft has none; set it to none"
        if self.importance_low > self.importance_high:
            yield f"importance_low={self.importance_low} is above importance_high={self.importance_high}; swap them"
