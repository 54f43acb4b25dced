"""The loss, composed of policy term, off-policy corrections, KL and entropy bonus, with its metrics."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from slime_like.algorithms.importance import (
    LOG_RATIO_BOUND,
    LOGPROB_BOUND,
    Correction,
    bounded_exp,
    configured_weights,
    find_correction,
    log_ratio,
    off_policy_sequence_mask,
)
from slime_like.algorithms.losses.kl import KLEstimator, find_kl_estimator, kept_sequences, kl_estimate
from slime_like.algorithms.losses.policy import LossInputs, PolicyLoss, PolicyTerms, required, token_ratio
from slime_like.algorithms.losses.sums import LossOutput, LossSums
from slime_like.algorithms.segments import spread_over_tokens
from slime_like.plugins.objective import LOSSES
from slime_like.plugins.resolve import require_options, resolve_callable
from slime_like.trajectory import PackedTrajectory, tensor_fields

if TYPE_CHECKING:
    from slime_like.config.algorithm import AlgorithmConfig  # needs pydantic, which this layer doesn't
    from slime_like.config.base import Part


def build_loss(config: AlgorithmConfig, distillation: float = 0.0) -> Loss:
    """Build the loss that the configuration names.

    Args:
        config: the objective; any object with the attributes of ``AlgorithmConfig`` will do.
        distillation: coefficient of the exact KL to a teacher.

    Returns:
        The loss. Call it with the ``LossInputs`` of a micro-batch.

    Raises:
        ValueError: an unknown name or import path, an object that isn't a ``PolicyLoss``, or an option that it
            doesn't have or allow.

    Example:
        >>> build_loss(AlgorithmConfig(loss={"name": "ppo_clip", "clip_high": 0.28})).needs_old
        True
    """
    return Loss(config, build_policy(config.loss), distillation=distillation)


def build_policy(loss: Part) -> PolicyLoss:
    """Build a policy term with its options. Raises as ``build_loss``."""
    made = find_policy(loss.name)
    require_options(f"loss {loss.name}", made, loss.options)
    return made(**loss.options)


def find_policy(name: str) -> Callable[..., PolicyLoss]:
    """Return the class of the policy term with this name, or at ``package.module:name``. Raises as ``build_loss``."""
    found: Any = resolve_callable("loss", name, LOSSES)
    missing = [attribute for attribute in ("name", "needs_old", "needs_advantages") if not hasattr(found, attribute)]
    if missing:
        raise ValueError(
            f"loss {name!r} has no {' and no '.join(missing)}; define the attributes that `PolicyLoss` describes"
        )
    return cast("Callable[..., PolicyLoss]", found)


class Loss:
    """``policy + kl.coef * KL - entropy_coef * H + distillation * D`` per token, weighted and summed.

    Args:
        config: coefficients and corrections.
        policy: the policy term.
        kl_estimator, correction: functions to use instead of those that the configuration names.
        distillation: coefficient of D, the exact KL to a teacher.

    Raises:
        ValueError: an unknown estimator or correction.

    Attributes:
        name: name of the policy term.
        needs_reference: ``ref_logprobs`` must be given.
        needs_old: ``old_logprobs`` must be given.
        needs_behaviour: ``behaviour_logprobs`` must be given.
        needs_entropy: ``entropy`` must be given, with graph.
    """

    def __init__(
        self,
        config: AlgorithmConfig,
        policy: PolicyLoss,
        kl_estimator: KLEstimator | None = None,
        correction: Correction | None = None,
        distillation: float = 0.0,
    ) -> None:
        self._config, self._policy, self._distillation = config, policy, distillation
        corrects = config.importance.correction != "none"
        self._correct = (correction or find_correction(config.importance.correction)) if corrects else None
        self.name = policy.name
        self.needs_reference = config.kl.coef > 0
        self.needs_old = (
            policy.needs_old
            or corrects
            or config.rejection.estimator != "none"
            or (self.needs_reference and config.kl.importance_weighted)
        )
        if self.needs_reference:
            self._kl_estimator = kl_estimator or find_kl_estimator(config.kl.estimator)
        self.needs_behaviour = corrects or config.rejection.estimator != "none"
        self.needs_entropy = config.entropy_coef > 0

    @staticmethod
    def inputs(
        pack: PackedTrajectory, logprobs: Tensor, entropy: Tensor, divergence: Tensor | None = None
    ) -> LossInputs:
        """Return the inputs of a pack: its fields, and the head's (R,) outputs for the whole pack, with graph."""
        known = {field.name: getattr(pack, field.name) for field in fields(LossInputs) if hasattr(pack, field.name)}
        described = tensor_fields(type(pack)).items()
        others = {name: getattr(pack, name) for name, each in described if each.is_per_token and name not in known}
        outputs = {"logprobs": logprobs, "entropy": entropy, "divergence": divergence}
        outputs |= {"behaviour_logprobs": pack.logprobs}
        given = {name: values for name, values in others.items() if values is not None}
        return LossInputs(**known | outputs, fields=given)

    def __call__(self, inputs: LossInputs) -> LossOutput:
        """Compute loss and metrics of one micro-batch.

        Args:
            inputs: tensors of whole sequences. Values on tokens that carry no loss have no effect.

        Returns:
            The undivided weighted sum, with graph, and the metrics.

        Raises:
            ValueError: an input that this loss needs is missing or has a wrong shape or type, or a custom policy term
                doesn't return (R,) values in ``PolicyTerms``.
        """
        inputs.check_shapes()
        inputs, rejected = self._without_rejected(inputs.cleaned())
        terms = self._policy(inputs)
        check_terms(self.name, terms, inputs)
        correction = None
        if self._correct is not None:
            old, behaviour = required(inputs, "old_logprobs"), required(inputs, "behaviour_logprobs")
            settings, lengths = self._config.importance, inputs.response_lens
            correction = configured_weights(settings, old, behaviour, inputs.loss_mask, lengths, self._correct)
        policy = self._corrected(terms.per_token, correction, inputs)
        kl = self._kl(inputs)
        per_token = policy
        if kl is not None:
            per_token = per_token + self._config.kl.coef * kl
        if self.needs_entropy:
            per_token = per_token - self._config.entropy_coef * required(inputs, "entropy")
        if self._distillation > 0:
            per_token = per_token + self._distillation * required(inputs, "divergence")
        loss = _weighted_sum(per_token, inputs)
        sums = _metrics(inputs, loss, policy, kl, terms, correction)
        sums.rejected = rejected
        return LossOutput(loss, sums)

    def _without_rejected(self, inputs: LossInputs) -> tuple[LossInputs, Tensor]:
        """Return the inputs without loss on rejected sequences, and the number of tokens that lose it."""
        rejection, before = self._config.rejection, inputs.loss_mask.sum().double()
        if rejection.estimator == "none":
            return inputs, torch.zeros_like(before)
        old, behaviour = required(inputs, "old_logprobs"), required(inputs, "behaviour_logprobs")
        lengths = required(inputs, "response_lens")
        kept = kept_sequences(rejection, old, behaviour, inputs.loss_mask, lengths)
        mask = inputs.loss_mask & spread_over_tokens(kept, lengths, inputs.loss_mask.numel())
        return replace(inputs, loss_mask=mask).cleaned(), before - mask.sum()

    def _corrected(self, per_token: Tensor, correction: tuple[Tensor, Tensor] | None, inputs: LossInputs) -> Tensor:
        if correction is not None:
            per_token = per_token * correction[0]
        if inputs.mean_weights is not None:
            per_token = per_token / inputs.mean_weights
        threshold = self._config.off_policy_mask
        if threshold is None:
            return per_token
        sampled = inputs.behaviour_logprobs if inputs.behaviour_logprobs is not None else inputs.old_logprobs
        if sampled is None:
            raise ValueError("off_policy_mask needs behaviour_logprobs or old_logprobs; the micro-batch has neither")
        advantages, lengths = required(inputs, "advantages"), required(inputs, "response_lens")
        keep = off_policy_sequence_mask(inputs.logprobs, sampled, advantages, inputs.loss_mask, lengths, threshold)
        return torch.where(keep, per_token, 0.0)

    def _kl(self, inputs: LossInputs) -> Tensor | None:
        if not self.needs_reference:
            return None
        reference = required(inputs, "ref_logprobs")
        kl = kl_estimate(inputs.logprobs, reference, self._kl_estimator)
        if self._config.kl.straight_through:
            exact = kl_estimate(inputs.logprobs, reference, "k2")
            return exact + (kl - exact).detach()
        return token_ratio(inputs) * kl if self._config.kl.importance_weighted else kl


def check_terms(name: str, terms: PolicyTerms, inputs: LossInputs) -> None:
    """Raise ``ValueError`` if a scalar would be broadcast, which would count a mean once per token."""
    if not isinstance(terms, PolicyTerms):
        raise ValueError(f"loss {name!r} returned a {type(terms).__name__}; return PolicyTerms(per_token, ...)")
    for field in ("per_token", "ratio", "clipped"):
        value: Tensor | None = getattr(terms, field)
        if value is not None and value.shape != inputs.logprobs.shape:
            raise ValueError(
                f"loss {name!r} returned {field} of shape {tuple(value.shape)} for {inputs.logprobs.numel()} response "
                "tokens; return one value per token, without weighting or reducing them"
            )


def _weighted_sum(per_token: Tensor, inputs: LossInputs) -> Tensor:
    return (torch.where(inputs.loss_mask, per_token, 0.0) * inputs.token_weights).sum()


@torch.no_grad()
def _metrics(
    inputs: LossInputs,
    loss: Tensor,
    policy: Tensor,
    kl: Tensor | None,
    terms: PolicyTerms,
    correction: tuple[Tensor, Tensor] | None,
) -> LossSums:
    """Return the sums over tokens. Without old logprobs, the current ones are used for ``surprisal`` and the gaps."""
    current, old, engine, reference = (
        inputs.logprobs.detach(), inputs.old_logprobs, inputs.behaviour_logprobs, inputs.ref_logprobs,
    )  # fmt: skip
    start = current if old is None else old
    ratio = terms.ratio if terms.ratio is not None or old is None else token_ratio(inputs)
    tokens = {"ratio": ratio, "divergence": inputs.divergence, "entropy": inputs.entropy, "surprisal": -start}
    tokens["bounded"] = _bounded(inputs)
    if reference is not None:
        tokens["approx_policy_kl"] = kl_estimate(current, reference, "k3")
    if terms.clipped is not None:  # without an advantage, there is no gradient to remove
        tokens["clipped"] = terms.clipped if inputs.advantages is None else terms.clipped & (inputs.advantages != 0)
    if correction is not None:
        weights, changed = correction
        tokens |= {"importance_weight": weights, "importance_clipped": changed, "squared_weight": weights.square()}
    gaps = {"old_gap_max": (current - start).abs()}
    if engine is not None:
        tokens |= {"engine_surprisal": -engine, "engine_gap": (engine - start).abs()}
        tokens["squared_engine_ratio"] = bounded_exp(log_ratio(start, engine)).square()
        gaps["engine_gap_max"] = (engine - start).abs()
    sums = LossSums.zeros(loss.device)
    sums.loss, sums.num_tokens = loss.detach().double(), inputs.loss_mask.sum().double()
    sums.policy_loss = _weighted_sum(policy, inputs).double()
    sums.kl_loss = sums.kl_loss if kl is None else _weighted_sum(kl, inputs).double()
    for name, values in tokens.items():
        if values is not None:
            setattr(sums, name, torch.where(inputs.loss_mask, values, 0).sum(dtype=torch.float64))
    for name, gap in gaps.items() if current.numel() else ():
        setattr(sums, name, torch.where(inputs.loss_mask, gap, 0).max().double())
    return sums


def _bounded(inputs: LossInputs) -> Tensor:
    """Return (R,) bool, True if one of the token's logprobs or log ratios is outside the bounds."""
    current, old = inputs.logprobs.detach(), inputs.old_logprobs
    found = current.abs() >= LOGPROB_BOUND
    for one, other in ((current, old), (inputs.behaviour_logprobs, old), (current, inputs.ref_logprobs)):
        if one is not None and other is not None:
            found |= (one - other).abs() > LOG_RATIO_BOUND
    return found
