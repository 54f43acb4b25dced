"""Objective: one pack's share of the step's loss, from its logprobs."""

from typing import NoReturn

from torch import Tensor

from backends.common.step.sums import StepSums
from slime_like.algorithms.losses import Loss, LossInputs, build_loss
from slime_like.algorithms.losses.loss import check_terms, find_policy
from slime_like.algorithms.losses.types import PolicyTerms
from slime_like.config import AlgorithmConfig, RunConfig
from slime_like.errors import SlimeLikeError, TrainerError
from slime_like.plugins.traceback import format_error, full_traceback
from slime_like.trajectory import PackedTrajectory


class Objective:
    """The configured loss, and where its old logprobs come from."""

    def __init__(self, config: RunConfig) -> None:
        self._loss = configured_loss(config.algorithm)
        self._freezes = not (config.supervised or config.algorithm.scores_policy)

    def add(
        self, step: StepSums, given: PackedTrajectory, pack: PackedTrajectory, logprobs: Tensor, entropy: Tensor
    ) -> Tensor:
        """The weighted sum of the pack's per-token losses, to run backward from; ``step`` takes in its metrics.

        Args:
            given: the pack as the trainer was given it; old logprobs that are those of this pass are written into it.
            pack: the same on this rank's device.
            logprobs, entropy: (R,) of the whole pack.
        """
        if pack.old_logprobs is None and self._freezes:
            # The only update of its batch starts from the very weights that old logprobs are of.
            given.old_logprobs = pack.old_logprobs = logprobs.detach().float()
        output = self._loss.of_checked_lengths(
            LossInputs(
                logprobs=logprobs,
                entropy=entropy,
                old_logprobs=pack.old_logprobs,
                behaviour_logprobs=pack.logprobs,
                ref_logprobs=pack.ref_logprobs,
                advantages=pack.advantages,
                loss_mask=pack.loss_mask,
                token_weights=pack.token_weights,
                response_lens=pack.response_lens,
            )
        )
        step.add(output.loss, output.sums)
        return output.loss


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
