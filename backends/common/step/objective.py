"""The loss of a trained role, by its head, and errors that name a user's part of it."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeVar, cast

from torch import Tensor

from backends.common.process.agreement import rank_error
from slime_like.algorithms.critic import value_loss
from slime_like.algorithms.importance import find_correction
from slime_like.algorithms.losses.kl import find_kl_estimator
from slime_like.algorithms.losses.loss import Loss, build_policy, check_terms
from slime_like.algorithms.losses.policy import LossInputs, PolicyLoss, PolicyTerms
from slime_like.algorithms.losses.sums import ValueSums
from slime_like.config import AlgorithmConfig, RunConfig
from slime_like.config.base import Part
from slime_like.errors import TrainerError
from slime_like.plugins.resolve import naming
from slime_like.trajectory import PackedTrajectory

ValueInputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
"""Values, old values, returns, loss mask and token weights, (R,) each."""


class ValueLoss:
    """The critic's loss, in place of a policy's ``Loss``."""

    def __init__(self, config: RunConfig) -> None:
        self._clip = config.critic.value_clip

    def inputs(self, pack: PackedTrajectory, values: Tensor) -> ValueInputs:
        """Return the inputs of a pack; ``values`` is (R,) for the whole pack, with graph."""
        if pack.values is None or pack.returns is None:
            raise rank_error(
                "accumulate",
                "a pack has no values or no returns",
                code="no-returns",
                remedy="score it first, and set the returns that follow from its rewards",
            )
        return values, pack.values, pack.returns, pack.loss_mask, pack.token_weights

    def __call__(self, inputs: ValueInputs) -> tuple[Tensor, ValueSums]:
        return value_loss(*inputs, self._clip)


LOSSES_OF_HEADS: Mapping[str, Callable[[RunConfig], Any]] = {
    "logprob": lambda config: configured_loss(config.algorithm, config.distillation.exact_coef),
    "value": ValueLoss,
}
"""Loss of a trained role, by the name of its head. ``inputs`` gets a pack and the head's outputs in order; the loss is
called with them, and returns the undivided sum and its metrics."""


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
