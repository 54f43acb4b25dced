"""Objective: one pack's share of the step's loss, from its logprobs."""

from torch import Tensor

from backends.common.step.custom_loss import configured_loss
from backends.common.step.sums import StepSums
from slime_like.algorithms.losses import LossInputs
from slime_like.config import RunConfig
from slime_like.trajectory import PackedTrajectory


class Objective:
    """The configured loss, and where its old logprobs come from."""

    def __init__(self, config: RunConfig) -> None:
        self._loss = configured_loss(config.algorithm)
        self._freezes = not (config.supervised or config.algorithm.scores_policy)

    def add(
        self, step: StepSums, given: PackedTrajectory, pack: PackedTrajectory, logprobs: Tensor, entropy: Tensor
    ) -> Tensor:
        """The weighted sum of the pack's per-token losses, to run backward from; ``step`` takes in its figures.

        Args:
            given: the pack as the trainer was given it; old logprobs that are those of this pass are written into it.
            pack: the same on this rank's device.
            logprobs, entropy: (R,) of the whole pack.
        """
        if pack.old_logprobs is None and self._freezes:
            # The only update of its batch starts from the very weights that old logprobs are of.
            given.old_logprobs = pack.old_logprobs = logprobs.detach().float()
        output = self._loss(
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
