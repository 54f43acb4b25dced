"""Comparison of two layouts' results on the same batch; a difference names its tensor, or its token."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

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
    first = _first_token(gaps, found, expected, batch, tolerances.logprob_max)
    if first:
        parity.differences.append(first)
    elif not parity.logprob_mean <= tolerances.logprob_mean:
        parity.differences.append(
            f"logprobs differ by {parity.logprob_mean:.2e} nats on average, {tolerances.logprob_mean:.0e} is allowed"
        )
    for name in ("losses", "grad_norms"):
        _compare_figures(name, found, expected, tolerances, parity)
    return parity


def _first_token(
    gaps: Sequence[Tensor],
    found: Measurement,
    expected: Measurement,
    batch: Sequence[ScoredTrajectory],
    bound: float,
) -> str | None:
    """The first token of the first sequence whose logprob is out of bounds; NaN is."""
    count = sum(int((~(gap <= bound)).sum()) for gap in gaps)
    for index, gap in enumerate(gaps):
        wrong = (~(gap <= bound)).nonzero()
        if len(wrong):
            token, sequence = int(wrong[0]), batch[index]
            return (
                f"logprob of sequence {sequence.sequence_id}, response token {token} (position "
                f"{sequence.prompt_len + token} of {sequence.total_len}) is {float(found.logprobs[index][token]):.6f} "
                f"instead of {float(expected.logprobs[index][token]):.6f}; {count} of {sum(map(len, gaps))} tokens "
                "differ"
            )
    return None


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
    """One tensor's deviation, relative to its size or change; ``difference`` says what is wrong, if anything."""

    name: str
    relative: float
    difference: str | None


def compare_tensor(name: str, found: Tensor, expected: Tensor, initial: Tensor, tolerances: Tolerances) -> TensorGap:
    """Compare a trained tensor, given what it was before training."""
    if found.shape != expected.shape:
        shapes = f"{tuple(found.shape)} instead of {tuple(expected.shape)}"
        return TensorGap(name, float("inf"), f"{_titled(name)} has the shape {shapes}")
    deviation = found.double() - expected.double()
    change = float((expected.double() - initial.double()).norm())
    size = float(deviation.norm())
    relative = 0.0 if size == 0 else size / max(change, 1e-30)
    if size <= tolerances.weight_change * change + tolerances.rounding * float(expected.double().norm()):
        return TensorGap(name, relative, None)
    place, text = _worst(deviation, found, expected)
    return TensorGap(
        name,
        relative,
        f"{_titled(name)} deviates by {relative:.2e} of its change in training; {text} "
        f"(before: {float(initial.flatten()[place]):.8g})",
    )


def compare_gradient(name: str, found: Tensor, expected: Tensor, grad_norm: float, tolerances: Tolerances) -> TensorGap:
    """Compare a tensor's gradient by its norm.

    Args:
        grad_norm: of the whole model's gradient: what is nothing beside it is rounding.
    """
    if found.shape != expected.shape:
        shapes = f"{tuple(found.shape)} instead of {tuple(expected.shape)}"
        return TensorGap(name, float("inf"), f"the gradient of {_titled(name)} has the shape {shapes}")
    deviation = found.double() - expected.double()
    norm, size = float(expected.double().norm()), float(deviation.norm())
    bound = tolerances.gradient * norm + tolerances.gradient_floor * grad_norm
    relative = 0.0 if size == 0 else size / max(norm, tolerances.gradient_floor * grad_norm, 1e-30)
    if size <= bound:
        return TensorGap(name, relative, None)
    _, text = _worst(deviation, found, expected)
    return TensorGap(name, relative, f"the gradient of {_titled(name)} deviates by {relative:.2e} of its norm; {text}")


def _worst(deviation: Tensor, found: Tensor, expected: Tensor) -> tuple[int, str]:
    """Find the largest difference of two tensors, as a flat index and in words."""
    flat = int(deviation.abs().nan_to_num(nan=torch.inf).argmax())
    place = [int(index) for index in torch.unravel_index(torch.tensor(flat), deviation.shape)]
    values = f"{float(found.flatten()[flat]):.8g} instead of {float(expected.flatten()[flat]):.8g}"
    return flat, f"most at {place}: {values}"


def missing_tensor(name: str) -> TensorGap:
    return TensorGap(name, float("inf"), f"{_titled(name)} is missing")


def unexpected_tensor(name: str) -> TensorGap:
    return TensorGap(name, float("inf"), f"{_titled(name)} should not exist")


def add_gradients(parity: Parity, gaps: Sequence[TensorGap]) -> None:
    """Put the comparison of all gradients into ``parity``; the first in the model that differs is named.

    The last one is named, too: a fault on the way back shows in everything before it, and so lies where the last is.
    """
    parity.gradients = _largest(gaps)
    _add_first(parity, gaps, "gradients", name_last=True)


def add_weights(parity: Parity, gaps: Sequence[TensorGap]) -> None:
    """Put the comparison of all tensors into ``parity``; of those that differ the first in the model is named."""
    parity.weights = _largest(gaps)
    _add_first(parity, gaps, "tensors")


def _largest(gaps: Sequence[TensorGap]) -> float:
    # max() forgets a NaN that does not come first.
    return max((float("inf") if gap.relative != gap.relative else gap.relative for gap in gaps), default=0.0)


def _add_first(parity: Parity, gaps: Sequence[TensorGap], what: str, name_last: bool = False) -> None:
    wrong = sorted((gap for gap in gaps if gap.difference), key=lambda gap: model_order(gap.name))
    if wrong:
        others = f"; {len(wrong)} of {len(gaps)} {what} differ" if len(wrong) > 1 else ""
        last = f", the last in the model is {_titled(wrong[-1].name)}" if others and name_last else ""
        parity.differences.append(f"{wrong[0].difference}{others}{last}")


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
