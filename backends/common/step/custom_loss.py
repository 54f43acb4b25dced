"""A custom loss, ``algorithm.loss=package.module:name``, whose failures name it and the line that failed."""

from typing import NoReturn

from slime_like.algorithms.losses import Loss, LossInputs, build_loss
from slime_like.algorithms.losses.loss import check_terms, find_policy
from slime_like.algorithms.losses.types import PolicyTerms
from slime_like.config import AlgorithmConfig
from slime_like.errors import SlimeLikeError, TrainerError
from slime_like.plugins.traceback import format_error, full_traceback


def configured_loss(config: AlgorithmConfig) -> Loss:
    """Build the configured loss, as ``build_loss`` does.

    Raises:
        TrainerError: a user's own loss cannot be imported or built; in a call of it, it raised or returned no terms.
    """
    return Loss(config, _UsersPolicy(config)) if ":" in config.loss else build_loss(config)


class _UsersPolicy:
    """A user's policy term; our own errors, which say everything, pass as they are."""

    def __init__(self, config: AlgorithmConfig) -> None:
        self._path = config.loss
        try:
            self._policy = find_policy(config.loss)(config)
            self.name = self._policy.name
            self.needs_old, self.needs_advantages = self._policy.needs_old, self._policy.needs_advantages
        except Exception as error:
            self._raise_named(error, "__init__")

    def __call__(self, inputs: LossInputs) -> PolicyTerms:
        try:
            terms = self._policy(inputs)
            check_terms(self.name, terms, inputs)
        except Exception as error:
            self._raise_named(error, "__call__")
        return terms

    def _raise_named(self, error: Exception, member: str) -> NoReturn:
        if isinstance(error, SlimeLikeError):
            raise error
        raise TrainerError(
            format_error("algorithm.loss", self._path, error, member),
            code="custom-loss-failed",
            remedy="correct it",
            users_traceback=full_traceback(error),
        ) from error
