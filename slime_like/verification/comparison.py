"""Comparison of two layouts' results on the same batch; a difference names its tensor, or its token."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from slime_like.trajectory import ScoredTrajectory
from slime_like.verification.tolerances import Tolerances

_LAYER = re.compile(r"\blayers\.(\d+)\.")
_PARTS = ("input_layernorm", "self_attn", "post_attention_layernorm", "mlp")
"""Of a layer, in the order in which they compute."""


@dataclass(slots=True)
class Measurement:
    """Results of one layout.

    Attributes:
        logprobs: (response_len,) of every sequence, in the batch's order, before any step.
        losses, grad_norms: of every optimizer step.
    """

    logprobs: list[Tensor]
    losses: list[float]
    grad_norms: list[float]


@dataclass(slots=True)
class Parity:
    """Deviation of a layout from the baseline.

    Attributes:
        logprob_max, logprob_mean: nats.
        loss: largest difference over the steps, relative to ``1 + |loss|``.
        grad_norm: largest relative difference over the steps.
        gradients: largest deviation of a tensor's first gradient, relative to its norm.
        weights: largest deviation of a tensor, relative to its change in training.
        differences: one sentence for everything that is out of bounds, in the order in which things are computed.
    """

    logprob_max: float = 0.0
    logprob_mean: float = 0.0
    loss: float = 0.0
    grad_norm: float = 0.0
    gradients: float = 0.0
    weights: float = 0.0
    differences: list[str] = field(default_factory=list)


def compare_measurements(
    found: Measurement, expected: Measurement, batch: Sequence[ScoredTrajectory], tolerances: Tolerances
) -> Parity:
    """Logprobs, losses and gradient norms; gradients and weights come separately, tensor by tensor."""
    parity = Parity()
    gaps = [(a - b).abs() for a, b in zip(found.logprobs, expected.logprobs, strict=True)]
    every = torch.cat(gaps)
    parity.logprob_max, parity.logprob_mean = float(every.max()), float(every.mean())
    wrong = [~(gap <= tolerances.logprob_max) for gap in gaps]  # NaN is out of bounds
    if any(tokens.any() for tokens in wrong):
        parity.differences.append(_first_token(wrong, found, expected, batch))
    elif not parity.logprob_mean <= tolerances.logprob_mean:
        parity.differences.append(
            f"logprobs differ by {parity.logprob_mean:.2e} nats on average, {tolerances.logprob_mean:.0e} is allowed"
        )
    for name in ("losses", "grad_norms"):
        _compare_figures(name, found, expected, tolerances, parity)
    return parity


def _first_token(
    wrong: Sequence[Tensor], found: Measurement, expected: Measurement, batch: Sequence[ScoredTrajectory]
) -> str:
    """Sentence about the first token of the first sequence whose logprob is out of bounds."""
    index = next(index for index, tokens in enumerate(wrong) if tokens.any())
    token, sequence = int(wrong[index].nonzero()[0]), batch[index]
    return (
        f"logprob of sequence {sequence.sequence_id}, response token {token} (position {sequence.prompt_len + token} "
        f"of {sequence.total_len}) is {float(found.logprobs[index][token]):.6f} instead of "
        f"{float(expected.logprobs[index][token]):.6f}; {int(torch.cat(list(wrong)).sum())} of "
        f"{sum(map(len, wrong))} tokens differ"
    )


def _compare_figures(
    name: str, found: Measurement, expected: Measurement, tolerances: Tolerances, parity: Parity
) -> None:
    what, bound = ("loss", tolerances.loss) if name == "losses" else ("grad_norm", tolerances.grad_norm)
    reported = False
    for step, (a, b) in enumerate(zip(getattr(found, name), getattr(expected, name), strict=True), start=1):
        gap = abs(a - b) / (1 + abs(b) if what == "loss" else max(abs(b), 1e-30))
        setattr(parity, what, max(getattr(parity, what), gap))
        if not gap <= bound and not reported:
            reported = True
            parity.differences.append(f"{what.replace('_', 'ient ')} of step {step} is {a:.8g} instead of {b:.8g}")


@dataclass(frozen=True, slots=True)
class TensorGap:
    """One tensor's deviation, relative to its size or change; ``difference`` is a sentence, if out of bounds."""

    name: str
    relative: float
    difference: str | None


def compare_tensor(name: str, found: Tensor, expected: Tensor, initial: Tensor, tolerances: Tolerances) -> TensorGap:
    """Compare a trained tensor, given what it was before training."""
    change = _norm(expected.double() - initial.double())
    bound = tolerances.weight_change * change + tolerances.rounding * _norm(expected)
    return _compare(name, _titled(name), found, expected, (change, "change in training"), bound, initial)


def compare_gradient(name: str, found: Tensor, expected: Tensor, grad_norm: float, tolerances: Tolerances) -> TensorGap:
    """Compare a tensor's gradient by its norm.

    Args:
        grad_norm: of the whole model's gradient: what is nothing beside it is rounding.
    """
    norm, floor = _norm(expected), tolerances.gradient_floor * grad_norm
    bound = tolerances.gradient * norm + floor
    return _compare(name, f"the gradient of {_titled(name)}", found, expected, (max(norm, floor), "norm"), bound)


def _compare(
    name: str,
    what: str,
    found: Tensor,
    expected: Tensor,
    scale: tuple[float, str],
    bound: float,
    initial: Tensor | None = None,
) -> TensorGap:
    """Compare a deviation's norm with ``bound``; it is given relative to ``scale``, which has a name."""
    if found.shape != expected.shape:
        shapes = f"{tuple(found.shape)} instead of {tuple(expected.shape)}"
        return TensorGap(name, float("inf"), f"{what} has the shape {shapes}")
    deviation = found.double() - expected.double()
    size = _norm(deviation)
    relative = 0.0 if size == 0 else size / max(scale[0], 1e-30)
    if size <= bound:
        return TensorGap(name, relative, None)
    worst = int(deviation.abs().nan_to_num(nan=torch.inf).argmax())
    place = [int(index) for index in torch.unravel_index(torch.tensor(worst), deviation.shape)]
    values = f"{float(found.flatten()[worst]):.8g} instead of {float(expected.flatten()[worst]):.8g}"
    before = "" if initial is None else f" (before: {float(initial.flatten()[worst]):.8g})"
    return TensorGap(
        name, relative, f"{what} deviates by {relative:.2e} of its {scale[1]}; most at {place}: {values}{before}"
    )


def _norm(tensor: Tensor) -> float:
    return float(tensor.double().norm())


def missing_tensor(name: str) -> TensorGap:
    return TensorGap(name, float("inf"), f"{_titled(name)} is missing")


def unexpected_tensor(name: str) -> TensorGap:
    return TensorGap(name, float("inf"), f"{_titled(name)} should not exist")


def add_gaps(parity: Parity, of: Literal["gradients", "weights"], gaps: Sequence[TensorGap]) -> None:
    """Put the comparison of all gradients, or of all weights, into ``parity``; the first in the model that differs is
    named.

    Of gradients the last one, too: a fault on the way back shows in everything before it, so it lies where the last is.
    """
    # max() forgets a NaN that does not come first.
    largest = max((float("inf") if gap.relative != gap.relative else gap.relative for gap in gaps), default=0.0)
    setattr(parity, of, largest)
    wrong = sorted((gap for gap in gaps if gap.difference), key=lambda gap: model_order(gap.name))
    if not wrong:
        return
    sentence = str(wrong[0].difference)
    if len(wrong) > 1:
        sentence += f"; {len(wrong)} of {len(gaps)} {'gradients' if of == 'gradients' else 'tensors'} differ"
    if len(wrong) > 1 and of == "gradients":
        sentence += f", the last in the model is {_titled(wrong[-1].name)}"
    parity.differences.append(sentence)


def model_order(name: str) -> tuple[int, int, int, str]:
    """Sort key of a Hugging Face tensor: embedding, layers in order (in each: attention, MLP), final norm, head."""
    layer = _LAYER.search(name)
    if layer:
        part = name[layer.end() :].partition(".")[0]
        return 1, int(layer[1]), _PARTS.index(part) if part in _PARTS else len(_PARTS), name
    if "embed" in name:
        return 0, 0, 0, name
    return (3 if "lm_head" in name else 2), 0, 0, name


def _titled(name: str) -> str:
    layer = _LAYER.search(name)
    return f"layer {layer[1]}, {name[layer.end() :]}" if layer else name
