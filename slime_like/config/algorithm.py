"""Section of the RL objective."""

from collections.abc import Iterator
from typing import Any, Literal

from pydantic import Field, field_validator

from slime_like.config.base import Part, Section, absolute_code
from slime_like.plugins.objective import DEMONSTRATION_LOSSES, GROUP_ADVANTAGES, SEQUENCE_LOSSES, STEP_LOSSES

_OF_SAMPLES = ("advantage", "whiten", "importance", "rejection", "off_policy_mask", "overlong", "old_logprobs")
"""Settings that training on demonstrations does not read."""


class KLConfig(Section):
    """KL divergence to the reference in the loss."""

    coef: float = Field(0.0, ge=0, description="Coefficient; 0: off.")
    estimator: str = Field("k3", description="k1, k2, k3, low_var_kl (k3, at most 10) or custom code.")
    importance_weighted: bool = Field(False, description="Multiply by pi / pi_old, for an unbiased gradient.")
    straight_through: bool = False
    """Use the gradient of k2 with the estimator's value (verl's `k3+`)."""

    _absolute = field_validator("estimator")(absolute_code)

    def conflicts(self) -> Iterator[str]:
        if self.straight_through and self.importance_weighted:
            yield "straight_through and algorithm.kl.importance_weighted are both unbiased gradients; use one of them"
        if self.coef > 0 and self.estimator == "k1" and not (self.importance_weighted or self.straight_through):
            remedy = "use k2 or k3, or set algorithm.kl.straight_through: true"
            yield f"estimator=k1 has no expected gradient in a loss (algorithm.kl.coef={self.coef:g}); {remedy}"


class KLRewardConfig(Section):
    """KL divergence to the reference, subtracted from rewards."""

    coef: float = Field(0.0, ge=0, description="Coefficient; 0: off.")
    estimator: Literal["k1", "k2", "k3", "low_var_kl"] = "k1"
    """Only k1's sum over a response has the gradient of the KL."""
    target: float | None = Field(None, gt=0)
    """Adapt the coefficient towards this KL of a response, in nats; none: constant."""
    gain: float = Field(0.1, gt=0)
    """The coefficient changes by this factor of the relative error, of which at most 0.2 counts."""

    def conflicts(self) -> Iterator[str]:
        if self.coef == 0 and (changed := self.changed):
            yield f"{changed} is set, but algorithm.kl_reward.coef=0; set a coefficient, or remove it"


class ImportanceConfig(Section):
    """Importance weights from the engine's policy to the trainer's."""

    correction: str = Field("none", description="none, truncate (tis), clip, mask (mis, icepop) or custom code.")
    level: Literal["token", "sequence", "geometric"] = "token"
    """Ratio per token, product over the sequence, or its geometric mean."""
    low: float = Field(0.5, ge=0, description="Lower bound on ratios, except for `truncate`.")
    high: float = Field(2.0, gt=0, description="Upper bound on ratios.")
    veto: float | None = Field(None, gt=0, description="Sequences that contain a ratio below this get weight 0.")
    normalize: bool = Field(False, description="Divide weights by the batch's mean weight.")

    _absolute = field_validator("correction")(absolute_code)

    @property
    def is_set(self) -> bool:
        return self.correction != "none"

    def conflicts(self) -> Iterator[str]:
        for name, value in (("veto", self.veto), ("normalize", self.normalize or None)):
            if not self.is_set and value is not None:
                yield f"{name}={str(value).lower()} needs algorithm.importance.correction; set it, e.g. to truncate"
        if self.low > self.high:
            yield f"low={self.low} is above algorithm.importance.high={self.high}; swap them"


class RejectionConfig(Section):
    """Rejection of sequences on which engine and trainer differ too much. They carry no loss."""

    estimator: Literal["none", "k2", "k3"] = "none"
    """Estimator of the KL from the engine to the trainer, per token; none: off."""
    over: Literal["sum", "mean", "max"] = Field("mean", description="How a sequence's tokens are combined.")
    bound: float = Field(0.01, gt=0, description="Largest divergence of a kept sequence, in nats.")
    in_denominator: bool = Field(True, description="Rejected sequences count in the mean of the loss.")

    @property
    def is_set(self) -> bool:
        return self.estimator != "none"

    @property
    def shrinks(self) -> bool:
        """Whether rejection changes the denominator of the loss, so it must be known before the update."""
        return self.is_set and not self.in_denominator

    def conflicts(self) -> Iterator[str]:
        if not self.is_set and (changed := self.changed):
            yield f"{changed} is set, but algorithm.rejection.estimator is none; set it, e.g. to k3, or remove it"


class OverlongConfig(Section):
    """DAPO's penalty for responses near the length limit."""

    buffer: int | None = Field(None, ge=1)
    """Tokens below the limit over which the penalty grows; none: off."""
    factor: float = Field(1.0, gt=0, description="Largest penalty.")


class AlgorithmConfig(Section):
    """Loss, advantages and corrections."""

    loss: Part = Field(Part(name="ppo_clip"), description="Policy term: a name or custom code, with its options.")
    advantage: Part = Field(Part(name="grpo"), description="Advantage estimator, in the same form.")
    whiten: bool = False
    """Normalize advantages to mean 0 and standard deviation 1 over tokens with loss."""
    reduction: Part = Field(Part(name="tokens"), description="Mean of the loss.")
    kl: KLConfig = KLConfig()
    kl_reward: KLRewardConfig = KLRewardConfig()
    entropy_coef: float = Field(0.0, ge=0, description="Coefficient of the entropy bonus.")
    importance: ImportanceConfig = ImportanceConfig()
    rejection: RejectionConfig = RejectionConfig()
    off_policy_mask: float | None = Field(None, ge=0)
    """Mask sequences of negative advantage if the policy moved by more nats per token."""
    overlong: OverlongConfig = OverlongConfig()
    moe_aux_loss_coef: float = Field(0.0, ge=0, description="Coefficient of the experts' load-balancing loss.")
    routing_replay: Literal["none", "old", "rollout"] = "none"
    """Experts of each token. none: the trainer's choice in each pass. old: in the first. rollout: the engine's."""
    epochs: int = Field(1, ge=1, description="Passes over one batch (ppo_epochs).")
    minibatches: int = Field(1, ge=1, description="Optimizer steps per pass.")
    old_logprobs: Literal["auto", "score"] = "auto"
    """score: compute old logprobs in an extra pass. auto: only if the update's pass cannot provide them."""

    @property
    def supervised(self) -> bool:
        """Whether the loss is of demonstrations."""
        return self.loss.name in DEMONSTRATION_LOSSES

    @property
    def needs_reference(self) -> bool:
        """Whether a reference model is loaded and scores every batch."""
        return self.kl.coef > 0 or self.kl_reward.coef > 0

    @property
    def compares_samples(self) -> bool:
        """Whether the advantages of a group of one are 0."""
        return self.advantage.name in GROUP_ADVANTAGES

    @property
    def needs_critic(self) -> bool:
        """Whether a value model is trained, whose values the advantages need."""
        return self.advantage.name == "gae" and not self.supervised

    @property
    def scores_policy(self) -> bool:
        """Whether a pass before the first update computes old logprobs. Later updates, the KL in the reward, the
        batch's mean importance weight and a denominator without rejected sequences need them."""
        before = self.kl_reward.coef > 0 or self.importance.normalize or self.rejection.shrinks or self.chooses_tokens
        return self.old_logprobs == "score" or self.epochs * self.minibatches > 1 or before

    @property
    def chooses_tokens(self) -> bool:
        """Whether the loss chooses tokens of the whole optimizer step."""
        return self.loss.name in STEP_LOSSES

    @property
    def least_spread(self) -> float:
        """Groups whose rewards have at most this spread have no advantage: the estimator's option ``eps``."""
        return float(self.advantage.options.get("eps", 1e-6))

    @property
    def per_sequence(self) -> tuple[str, ...]:
        """Settings with their values that need a ratio or a mean over a whole sequence."""
        importance = self.importance
        chosen: dict[str, Any] = {
            "loss": self.loss if self.loss.name in SEQUENCE_LOSSES else None,
            "importance.level": importance.level if importance.is_set and importance.level != "token" else None,
            "importance.veto": importance.veto,
            "rejection.estimator": self.rejection.estimator if self.rejection.is_set else None,
            "off_policy_mask": self.off_policy_mask,
        }
        return tuple(f"{name}={value}" for name, value in chosen.items() if value is not None)

    def row_conflicts(self) -> Iterator[str]:
        """Yield settings that rollouts of several rows exclude, because rows are trained separately."""
        remedies = {"loss": "use one per token, e.g. ppo_clip or cispo", "importance.level": "use token"}
        for setting in self.per_sequence:
            remedy = remedies.get(setting.partition("=")[0], "set it to none")
            yield f"algorithm.{setting} needs whole sequences, but a rollout's rows are trained separately; {remedy}"

    def unread(self) -> Iterator[str]:
        """Yield changed settings that training on demonstrations does not read."""
        if self.needs_reference:
            yield f"algorithm.loss={self.loss} has no reference; set coef of algorithm.kl and of kl_reward to 0"
        for name in self.all_changed:
            if name in _OF_SAMPLES:
                yield f"algorithm.{name} is set, but algorithm.loss={self.loss} has no sampled responses; remove it"

    def conflicts(self) -> Iterator[str]:
        if self.rejection.shrinks and self.reduction.name == "groups":
            yield "rejection.in_denominator=false does not support algorithm.reduction=groups; use tokens or samples"
        if self.routing_replay == "old" and self.epochs * self.minibatches == 1:
            yield "routing_replay=old needs later updates, but epochs=1 and minibatches=1; use none or rollout"
        if self.routing_replay != "none" and self.supervised:
            yield f"routing_replay={self.routing_replay} needs samples, but loss={self.loss} has none; set it to none"
