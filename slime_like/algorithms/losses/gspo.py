"""Group sequence policy optimization."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from slime_like.algorithms.bounds import bounded_exp, log_ratio
from slime_like.algorithms.losses.policy import required
from slime_like.algorithms.losses.ppo_clip import PPOClip
from slime_like.algorithms.losses.types import LossInputs
from slime_like.algorithms.segments import masked_segment_mean, spread_over_tokens


@dataclass(frozen=True)
class GSPO(PPOClip):
    """Group sequence policy optimization (arXiv:2507.18071 eq. 5 to 7): one ratio per sequence.

    ``s = exp(mean over loss-carrying tokens of (log pi - log pi_old))``, clipped as in PPO. Every token of a sequence
    carries the sequence's loss, so the reduction "samples" gives the paper's objective.

    Attributes:
        clip_low: as in PPO; the default is the paper's, because a sequence's ratio varies far less than a token's.
        clip_high: as in PPO.
        dual_clip: as in PPO.
    """

    clip_low: float = 3e-4
    clip_high: float = 4e-4

    name: ClassVar[str] = "gspo"
    per_sequence: ClassVar[bool] = True

    def ratio(self, inputs: LossInputs) -> Tensor:
        lengths = required(inputs, "response_lens")
        log_ratios = log_ratio(inputs.logprobs, required(inputs, "old_logprobs"))
        per_sequence = masked_segment_mean(log_ratios, inputs.loss_mask, lengths)
        return spread_over_tokens(bounded_exp(per_sequence), lengths, inputs.logprobs.numel())
