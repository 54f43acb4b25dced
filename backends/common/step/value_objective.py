"""Objective of a value model: one pack's share of the step's loss, computed from its values."""

from torch import Tensor

from backends.common.process.agreement import rank_error
from backends.common.step.sums import StepSums
from slime_like.algorithms.critic import value_loss
from slime_like.config import AlgorithmConfig
from slime_like.config.sections import CriticConfig
from slime_like.trajectory import PackedTrajectory


class ValueObjective:
    """The critic's loss. See ``Objective``."""

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
