"""Objectives by a role's head: one pack's share of the step's loss, computed from logprobs or values."""

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar, cast

from torch import Tensor

from backends.common.process.agreement import rank_error
from backends.common.step.sums import StepSums
from slime_like.algorithms.critic import value_loss
from slime_like.algorithms.importance import find_correction
from slime_like.algorithms.losses.kl import find_kl_estimator
from slime_like.algorithms.losses.loss import Loss, build_policy, check_terms
from slime_like.algorithms.losses.policy import LossInputs, PolicyLoss, PolicyTerms
from slime_like.config import AlgorithmConfig
from slime_like.config.base import Part
from slime_like.config.roles import ModelRole
from slime_like.config.sections import CriticConfig, DistillationConfig
from slime_like.errors import TrainerError
from slime_like.interfaces import Scores
from slime_like.plugins.resolve import resolve
from slime_like.plugins.traceback import naming
from slime_like.trajectory import PackedTrajectory

OBJECTIVES = {
    "logprob": "backends.common.step.objective:Objective",
    "value": "backends.common.step.objective:ValueObjective",
}
"""Objective of a trained role, by the name of its head. Its ``add`` method gets the head's outputs in order."""


class Objective:
    """The configured loss of a policy, and the source of its old logprobs."""

    def __init__(self, algorithm: AlgorithmConfig, distillation: DistillationConfig) -> None:
        self._loss = configured_loss(algorithm, distillation.exact_coef)
        self._freezes = not (algorithm.supervised or algorithm.scores_policy)

    def add(self, step: StepSums, given: PackedTrajectory, pack: PackedTrajectory, *outputs: Tensor) -> Tensor:
        """Return the weighted sum of the pack's per-token losses, for backward; ``step`` accumulates its metrics.

        Args:
            given: the pack as the trainer received it; if this pass provides its old logprobs, they are stored here.
            pack: the same pack on this rank's device.
            outputs: (R,) logprobs and entropies for the whole pack, and perhaps the KL to a teacher.
        """
        logprobs, entropy, *divergence = outputs
        if pack.old_logprobs is None and self._freezes:
            # The batch's only update starts from the weights that the old logprobs describe.
            given.old_logprobs = pack.old_logprobs = logprobs.detach().float()
        output = self._loss(
            LossInputs(
                logprobs=logprobs,
                entropy=entropy,
                old_logprobs=pack.old_logprobs,
                behaviour_logprobs=pack.logprobs,
                ref_logprobs=pack.ref_logprobs,
                advantages=pack.advantages,
                divergence=divergence[0] if divergence else None,
                set_apart=pack.set_apart,
                mean_weights=pack.mean_weights,
                loss_mask=pack.loss_mask,
                token_weights=pack.token_weights,
                response_lens=pack.response_lens,
            )
        )
        step.add(output.loss, output.sums, pack.source)
        return output.loss


class ValueObjective:
    """The critic's loss; see ``Objective``."""

    def __init__(self, algorithm: AlgorithmConfig, critic: CriticConfig) -> None:
        self._clip = critic.value_clip

    def add(self, step: StepSums, given: PackedTrajectory, pack: PackedTrajectory, values: Tensor) -> Tensor:
        """Return the weighted sum of the pack's per-token losses; ``values`` is (R,) for the whole pack."""
        if pack.values is None or pack.returns is None:
            raise rank_error(
                "accumulate",
                "a pack has no values or no returns",
                code="no-returns",
                remedy="score it first, and set the returns that follow from its rewards",
            )
        loss, sums = value_loss(values, pack.values, pack.returns, pack.loss_mask, pack.token_weights, self._clip)
        step.add(loss, sums)
        return loss


def objective_of(role: ModelRole, algorithm: AlgorithmConfig, critic: CriticConfig, teacher: DistillationConfig) -> Any:
    """Return the objective of a trained role; ``None`` for a frozen one."""
    if not role.trained:
        return None
    made: Callable[..., Any] = resolve("head", role.head, OBJECTIVES)
    return made(algorithm, critic if role.head == "value" else teacher)


def named_scores(role: ModelRole, scored: list[tuple[Tensor, ...]] | None) -> list[Scores] | None:
    """Return the head's outputs that the role's fields hold, in float32."""
    if scored is None:
        return None
    return [{name: values.float() for name, values in zip(role.fields, outputs, strict=False)} for outputs in scored]


def configured_loss(config: AlgorithmConfig, distillation: float = 0.0) -> Loss:
    """Build the configured loss, as ``build_loss`` does. ``distillation``: see ``Loss``.

    Raises:
        TrainerError: a user's part cannot be imported or built; or, when called, it raised or returned something
            invalid.
    """
    policy = cast("PolicyLoss", _UsersPolicy(config.loss)) if ":" in config.loss.name else build_policy(config.loss)
    estimator = _users_function("algorithm.kl.estimator", config.kl.estimator, find_kl_estimator)
    correction = _users_function("algorithm.importance.correction", config.importance.correction, find_correction)
    return Loss(config, policy, estimator, correction, distillation)


class _UsersPolicy:
    """A user's policy term."""

    def __init__(self, loss: Part) -> None:
        self._path = loss.name
        with _naming("algorithm.loss", self._path, "__init__"):
            self._policy = build_policy(loss)
            self.name = self._policy.name
            self.needs_old, self.needs_advantages = self._policy.needs_old, self._policy.needs_advantages

    def __call__(self, inputs: LossInputs) -> PolicyTerms:
        with _naming("algorithm.loss", self._path, "__call__"):
            terms = self._policy(inputs)
            check_terms(self.name, terms, inputs)
        return terms


_Part = TypeVar("_Part", bound=Callable[..., Any])


def _users_function(setting: str, path: str, find: Callable[[str], _Part]) -> _Part | None:
    """Return a user's function by import path, with errors that name it; ``None`` for a built-in part."""
    if ":" not in path:
        return None
    with _naming(setting, path, ""):
        function = find(path)
    return _naming(setting, path, "")(function)


_naming = partial(naming, TrainerError, "custom-loss-failed")
