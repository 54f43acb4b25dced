"""Policy terms: their inputs, output and interface, and what several of them use."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar, Protocol, Self

import torch
from torch import Tensor

from slime_like.algorithms.importance import bounded_exp, bounded_logprobs, log_ratio
from slime_like.algorithms.promise import Promise
from slime_like.algorithms.segments import require_alike, require_bool_mask

_LOGPROBS = ("logprobs", "old_logprobs", "behaviour_logprobs", "ref_logprobs")
_PER_TOKEN = (*_LOGPROBS, "entropy", "advantages", "divergence")


@dataclass(slots=True)
class LossInputs:
    """Per-response-token tensors of one micro-batch, all (R,), whole sequences in pack order.

    Attributes:
        logprobs: of the current policy, with graph.
        loss_mask: bool, True where the token carries loss.
        token_weights: weight in the loss sum.
        entropy: of the current policy, in nats; needed, with graph, if ``entropy_coef`` is above 0.
        old_logprobs: under the trainer's weights at the start of the step.
        behaviour_logprobs: as the engine reported them while sampling.
        ref_logprobs: under the reference model.
        advantages: the sequence's advantage on each of its tokens, or per-token advantages.
        response_lens: (S,) int64, needed if the loss has values per sequence.
        mean_weights: the batch's mean importance weight, by which importance weights are divided.
        divergence: exact KL to the teacher, with graph; needed if the loss distils.
        fields: all other fields of the pack per response token (``ScoredFields``), by name, for ``required``.
    """

    logprobs: Tensor
    loss_mask: Tensor
    token_weights: Tensor
    entropy: Tensor | None = None
    old_logprobs: Tensor | None = None
    behaviour_logprobs: Tensor | None = None
    ref_logprobs: Tensor | None = None
    advantages: Tensor | None = None
    response_lens: Tensor | None = None
    mean_weights: Tensor | None = None
    divergence: Tensor | None = None
    fields: Mapping[str, Tensor] = field(default_factory=dict)

    def check_shapes(self) -> None:
        """Raise ``ValueError`` if torch would broadcast a tensor, or if the mask isn't bool."""
        others = ("loss_mask", "token_weights", "mean_weights")
        require_alike(**{name: getattr(self, name) for name in (*_PER_TOKEN, *others)}, **self.fields)
        require_bool_mask(self.loss_mask)

    def cleaned(self) -> Self:
        """Return the inputs with 0 on tokens that carry no loss, so values there (inf and nan too) have no effect.

        Logprobs are bounded (``importance.py``), so everything computed from them is finite, even from the -inf of a
        masked vocabulary. All tensors become at least as precise as ``logprobs``: the difference of two float32
        policies would be rounded before it meets a float64 logprob.
        """
        given = {name: getattr(self, name) for name in _PER_TOKEN} | dict(self.fields)
        cut = {name: self._cut(values) for name, values in given.items() if values is not None}
        cut |= {name: bounded_logprobs(cut[name]) for name in _LOGPROBS if name in cut}
        fields = {name: cut.pop(name) for name in self.fields}
        return replace(self, token_weights=torch.where(self.loss_mask, self.token_weights, 0.0), **cut, fields=fields)

    def _cut(self, values: Tensor) -> Tensor:
        if values.is_floating_point():
            values = values.to(torch.promote_types(values.dtype, self.logprobs.dtype))
        return values.masked_fill(~self.loss_mask, 0)


@dataclass(slots=True)
class PolicyTerms:
    """The policy part of a loss.

    Attributes:
        per_token: (R,) loss before weights, with graph.
        ratio: (R,) pi_current / pi_old as this loss uses it, detached; ``None`` if the loss has no ratio.
        clipped: (R,) bool, True if the clip removed or bounded the token's gradient; ``None`` without a clip.
    """

    per_token: Tensor
    ratio: Tensor | None = None
    clipped: Tensor | None = None


class PolicyLoss(Protocol):
    """A policy term: built with its options, called with the inputs of a micro-batch.

    Ratios come from recorded logprobs, never from a detached copy.

    Attributes:
        name: its name in the configuration and in metrics.
        needs_old, needs_advantages: the term needs ``old_logprobs`` and ``advantages``.
        per_sequence: a token's value may depend on other tokens of its sequence. Rollouts of several rows, which are
            trained row by row, need ``False``; a class without the attribute counts as ``True``.
    """

    name: ClassVar[str]
    needs_old: ClassVar[bool]
    needs_advantages: ClassVar[bool]
    per_sequence: ClassVar[bool]

    def __call__(self, inputs: LossInputs) -> PolicyTerms: ...


class RatioLoss(PolicyLoss, Protocol):
    """A policy term of each token's advantage and ratio to the old policy."""

    needs_old: ClassVar[bool] = True
    needs_advantages: ClassVar[bool] = True
    per_sequence: ClassVar[bool] = False
    promise: ClassVar[Promise] = Promise(follows=True)


def required(inputs: LossInputs, name: str) -> Tensor:
    """Return an input that the loss needs; raise ``ValueError`` if it is missing."""
    value: Tensor | None = getattr(inputs, name, inputs.fields.get(name))
    if value is None:
        raise ValueError(f"this loss needs {name}, but the micro-batch has none; see LossInputs")
    return value


def token_ratio(inputs: LossInputs) -> Tensor:
    """Return (R,) pi_current / pi_old, with graph, between exp(-20) and exp(20) (``importance.py``)."""
    return bounded_exp(log_ratio(inputs.logprobs, required(inputs, "old_logprobs")))


def require_option(name: str, value: float | None, low: float, high: float = math.inf, above: bool = False) -> None:
    """Raise ``ValueError`` unless an option is ``None`` or within its bounds; ``above``: more than ``low``."""
    if value is not None and not (low < value <= high or (value == low and not above)):
        least, most = f"{'above' if above else 'at least'} {low:g}", f" and at most {high:g}" if high < math.inf else ""
        raise ValueError(f"{name}={value:g} must be {least}{most}; correct it")
