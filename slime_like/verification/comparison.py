"""What two layouts computed from the same batch, compared; a difference names its tensor, or its token."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from slime_like.trajectory import ScoredTrajectory
from slime_like.verification.tolerances import Tolerances

_LAYER = re.compile(r"\blayers\.(\d+)\.")


@dataclass(slots=True)
class Measurement:
    """What one layout computed.

    Attributes:
        logprobs: (response_len,) of every sequence, in the batch's order, before any step.
        losses, grad_norms: of every optimizer step.
    """

    logprobs: list[Tensor]
    losses: list[float]
    grad_norms: list[float]


@dataclass(slots=True)
class Parity:
    """How far a layout is from the one it is compared with.

    Attributes:
        logprob_max, logprob_mean: nats.
        loss: largest difference over the steps, relative to ``1 + |loss|``.
        grad_norm: largest relative difference over the steps.
        weights: largest deviation of a tensor, relative to its change in training.
        differences: one sentence for everything that is out of bounds, in the order in which things are computed.
    """

    logprob_max: float = 0.0
    logprob_mean: float = 0.0
    loss: float = 0.0
    grad_norm: float = 0.0
    weights: float = 0.0
    differences: list[str] = field(default_factory=list)


def compare_measurements(
    found: Measurement, expected: Measurement, batch: Sequence[ScoredTrajectory], tolerances: Tolerances
) -> Parity:
    """Logprobs, losses and gradient norms; the weights come separately, tensor by tensor."""
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
    """One tensor after training. ``relative`` is to its change; ``difference`` says what is wrong, if anything."""

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
    worst = deviation.abs().nan_to_num(nan=torch.inf).argmax()
    place = [int(index) for index in torch.unravel_index(worst, deviation.shape)]
    return TensorGap(
        name,
        relative,
        f"{_titled(name)} deviates by {relative:.2e} of its change in training; most at {place}: "
        f"{float(found.flatten()[worst]):.8g} instead of {float(expected.flatten()[worst]):.8g} "
        f"(before: {float(initial.flatten()[worst]):.8g})",
    )


def missing_tensor(name: str) -> TensorGap:
    return TensorGap(name, float("inf"), f"{_titled(name)} is missing")


def unexpected_tensor(name: str) -> TensorGap:
    return TensorGap(name, float("inf"), f"{_titled(name)} should not exist")


def add_weights(parity: Parity, gaps: Sequence[TensorGap]) -> None:
    """Put the comparison of all tensors into ``parity``; of those that differ the first in the model is named."""
    # max() forgets a NaN that does not come first.
    parity.weights = max((float("inf") if gap.relative != gap.relative else gap.relative for gap in gaps), default=0.0)
    wrong = sorted((gap for gap in gaps if gap.difference), key=lambda gap: model_order(gap.name))
    if wrong:
        others = f"; {len(wrong)} of {len(gaps)} tensors differ" if len(wrong) > 1 else ""
        parity.differences.append(f"{wrong[0].difference}{others}")


def model_order(name: str) -> tuple[int, int, str]:
    """Where a Hugging Face tensor stands: embedding, layers in order, final norm, head."""
    layer = _LAYER.search(name)
    if layer:
        return 1, int(layer[1]), name
    if "embed" in name:
        return 0, 0, name
    return (3 if "lm_head" in name else 2), 0, name


def _titled(name: str) -> str:
    layer = _LAYER.search(name)
    return f"layer {layer[1]}, {name[layer.end() :]}" if layer else name
