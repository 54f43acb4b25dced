"""Inputs of a loss, and the output of its policy term."""

from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from slime_like.algorithms.bounds import bounded_logprobs
from slime_like.algorithms.tensor_checks import require_alike, require_bool_mask

_LOGPROBS = ("logprobs", "old_logprobs", "behaviour_logprobs", "ref_logprobs")
_PER_TOKEN = (*_LOGPROBS, "entropy", "advantages")


@dataclass(slots=True)
class LossInputs:
    """Per-response-token tensors of one micro-batch, all (R,), whole sequences in pack order.

    Attributes:
        logprobs: of the current policy, with graph.
        entropy: of the current policy, nats; needed where ``entropy_coef`` is above 0, with graph then.
        old_logprobs: under the trainer's weights at the start of the step.
        behaviour_logprobs: as the engine reported them while sampling.
        ref_logprobs: under the reference model.
        advantages: each sequence's advantage on its tokens (or per-token advantages).
        loss_mask: bool, True where the token carries loss.
        token_weights: weight in the loss sum.
        response_lens: (S,) int64, for what is per sequence; none where nothing is.
    """

    logprobs: Tensor
    entropy: Tensor | None
    old_logprobs: Tensor | None
    behaviour_logprobs: Tensor | None
    ref_logprobs: Tensor | None
    advantages: Tensor | None
    loss_mask: Tensor
    token_weights: Tensor
    response_lens: Tensor | None = None

    def check_shapes(self) -> None:
        """Raise ``ValueError`` if something would be broadcast, or a mask is not bool."""
        require_alike(**{name: getattr(self, name) for name in (*_PER_TOKEN, "loss_mask", "token_weights")})
        require_bool_mask(self.loss_mask)

    def cleaned(self) -> Self:
        """The same with 0 on tokens that carry no loss: whatever stood there, inf and nan too, has no effect at all.
        Logprobs are bounded (``bounds.py``): what is made of them is finite, -inf from a masked vocabulary included.

        Everything is at least as precise as ``logprobs``: the difference of two float32 policies, or a bound times a
        float32 advantage, would be rounded before it meets a float64 logprob.
        """
        cut = {"token_weights": torch.where(self.loss_mask, self.token_weights, 0.0)}
        for name in _PER_TOKEN:
            if (values := getattr(self, name)) is not None:
                precise = values.to(torch.promote_types(values.dtype, self.logprobs.dtype))
                cut[name] = torch.where(self.loss_mask, precise, 0.0)
        cut |= {name: bounded_logprobs(cut[name]) for name in _LOGPROBS if name in cut}
        return replace(self, **cut)


@dataclass(slots=True)
class PolicyTerms:
    """The policy part of a loss.

    Attributes:
        per_token: (R,) loss before weights, with graph.
        ratio: (R,) pi_current / pi_old as this loss uses it, detached; ``None`` if it uses none.
        clipped: (R,) bool, tokens whose gradient the clip removed or bounded; ``None`` if it clips nothing.
    """

    per_token: Tensor
    ratio: Tensor | None = None
    clipped: Tensor | None = None
