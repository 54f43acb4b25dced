"""The batch of every layout, and the comparison of two layouts' results; a difference names its tensor or token."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor

from slime_like.errors import DataError
from slime_like.interfaces import Scores
from slime_like.models.dimensions import ModelDimensions
from slime_like.trajectory import ScoredTrajectory
from slime_like.verification.layouts import Tolerances

SYNTHETIC_BUDGET = 192
"""Token budget that splits the synthetic batch into several packs, one of them a single long sequence."""

_GROUP_SIZE = 4
# (prompt, response): a single response token; a long prompt, so its response is in one context rank's part; a long
# response; lengths that no 2 * context divides.
_LENGTHS = (
    (5, 9), (3, 1), (11, 6), (2, 17), (60, 2), (8, 21), (7, 3), (4, 12),
    (1, 30), (30, 31), (13, 7), (150, 33), (2, 5), (6, 64), (9, 9), (40, 1),
)  # fmt: skip
_FULLY_MASKED = 6


def synthetic_batch(dimensions: ModelDimensions, seed: int = 0) -> list[ScoredTrajectory]:
    """Return sixteen scored sequences of random tokens in groups of four, determined by vocabulary and seed."""
    generator = torch.Generator().manual_seed(seed)
    batch = []
    for index, (prompt, response) in enumerate(_LENGTHS):
        tokens = torch.randint(0, dimensions.vocab_size, (prompt + response,), generator=generator)
        loss_mask = torch.rand(response, generator=generator) < 0.85
        loss_mask[-1] = True
        if index == _FULLY_MASKED:
            loss_mask = torch.zeros_like(loss_mask)
        name, group = f"synthetic-{index}", index // _GROUP_SIZE
        bare = ScoredTrajectory.unrewarded(name, tokens[:prompt], tokens[prompt:], group_id=group)
        advantage = torch.randn((), generator=generator)
        temperature = (1.0, 0.7, 1.3)[index % 3]
        batch.append(replace(bare, loss_mask=loss_mask, advantages=advantage, temperature=temperature))
    return batch


def require_fit(sequences: Sequence[ScoredTrajectory], dimensions: ModelDimensions, source: str) -> None:
    """Check that this model can compute these sequences.

    Raises ``DataError`` if there is no sequence, or one has ids or a length that the model does not support.
    """
    if not sequences:
        remedy = "keep another step's rollouts"
        raise DataError("holds no sequence", code="empty-dump", who=source, remedy=remedy)
    for sequence in sequences:
        highest = max(int(sequence.prompt_tokens.max()), int(sequence.response_tokens.max()))
        if highest >= dimensions.vocab_size:
            problem = f"has the id {highest}, but the model has ids 0 to {dimensions.vocab_size - 1}"
        elif sequence.total_len > (longest := dimensions.max_position_embeddings):
            problem = f"has {sequence.total_len} tokens, more than the model's max_position_embeddings={longest}"
        else:
            continue
        problem, remedy = f"sequence {sequence.sequence_id} {problem}", "give the model of these rollouts"
        raise DataError(problem, code="rollouts-of-another-model", who=source, remedy=remedy)


def add_frozen_logprobs(
    sequences: Sequence[ScoredTrajectory], scores: Sequence[Scores], seed: int = 0
) -> list[ScoredTrajectory]:
    """Add missing logprobs that the loss needs: the policy's logprobs plus noise from ``seed``.

    All layouts must get the same logprobs, so a fault in a layout's scoring does not carry over to its training.
    """
    generator = torch.Generator().manual_seed(seed)
    frozen = []
    for sequence, logprobs in zip(sequences, (score["old_logprobs"] for score in scores), strict=True):
        noisy = {
            name: logprobs + scale * torch.randn(len(logprobs), generator=generator)
            for name, scale in (("old_logprobs", 0.05), ("logprobs", 0.06), ("ref_logprobs", 0.2))
        }
        missing: dict[str, Any] = {name: values for name, values in noisy.items() if getattr(sequence, name) is None}
        frozen.append(replace(sequence, **missing))
    return frozen


_LAYER = re.compile(r"\blayers\.(\d+)\.")
_PARTS = ("input_layernorm", "self_attn", "linear_attn", "post_attention_layernorm", "mlp")
"""Parts of a layer in the order of computation."""


@dataclass(slots=True)
class Measurement:
    """Results of one layout.

    Attributes:
        logprobs: (response_len,) per sequence, in the batch's order, before any step.
        loss, grad_norm: value of each optimizer step.
    """

    logprobs: list[Tensor]
    loss: list[float]
    grad_norm: list[float]


@dataclass(slots=True)
class Parity:
    """Deviation of a layout from the baseline.

    Attributes:
        logprob_max, logprob_mean: nats.
        loss: largest difference of a step, relative to ``1 + |loss|``.
        grad_norm: largest relative difference of a step.
        gradients: largest deviation of a tensor's first gradient, relative to its norm.
        weights: largest deviation of a tensor, relative to its change in training.
        differences: a sentence for everything that is out of bounds, in the order of computation.
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
    """Compare logprobs, losses and gradient norms. Gradients and weights are compared separately, tensor by tensor."""
    parity = Parity()
    gaps = [(a - b).abs() for a, b in zip(found.logprobs, expected.logprobs, strict=True)]
    every = torch.cat(gaps)
    parity.logprob_max, parity.logprob_mean = float(every.max()), float(every.mean())
    wrong = [~(gap <= tolerances.logprob_max) for gap in gaps]  # NaN is out of bounds
    if (index := next((index for index, tokens in enumerate(wrong) if tokens.any()), None)) is not None:
        token, sequence = int(wrong[index].nonzero()[0]), batch[index]
        values = [float(side.logprobs[index][token]) for side in (found, expected)]
        parity.differences.append(
            f"logprob of sequence {sequence.sequence_id}, response token {token} (position "
            f"{sequence.prompt_len + token} of {sequence.total_len}) is {values[0]:.6f} instead of {values[1]:.6f}; "
            f"{int(torch.cat(wrong).sum())} of {sum(map(len, wrong))} tokens differ"
        )
    elif not parity.logprob_mean <= tolerances.logprob_mean:
        parity.differences.append(
            f"logprobs differ by {parity.logprob_mean:.2e} nats on average, {tolerances.logprob_mean:.0e} is allowed"
        )
    for name, title, floor in (("loss", "loss", 1.0), ("grad_norm", "gradient norm", 1e-30)):
        steps = list(zip(getattr(found, name), getattr(expected, name), strict=True))
        relative = [abs(a - b) / (floor + abs(b)) for a, b in steps]
        setattr(parity, name, _largest(relative))
        first = next((step for step, gap in enumerate(relative) if not gap <= getattr(tolerances, name)), None)
        if first is not None:
            a, b = steps[first]
            parity.differences.append(f"{title} of step {first + 1} is {a:.8g} instead of {b:.8g}")
    return parity


def _largest(gaps: Iterable[float]) -> float:
    """Return the largest gap; infinity if one is NaN, which ``max`` could lose."""
    return max((float("inf") if gap != gap else gap for gap in gaps), default=0.0)


@dataclass(frozen=True, slots=True)
class TensorGap:
    """Deviation of one tensor, relative to its size or change; ``difference`` is a sentence if it is out of bounds."""

    name: str
    relative: float
    difference: str | None


def compare_tensor(name: str, found: Tensor, expected: Tensor, initial: Tensor, tolerances: Tolerances) -> TensorGap:
    """Compare a trained tensor, relative to its change since ``initial``."""
    change = _norm(expected.double() - initial.double())
    bound = tolerances.weight_change * change + tolerances.rounding * _norm(expected)
    return _compare(name, _titled(name), found, expected, (change, "change in training"), bound)


def compare_gradient(name: str, found: Tensor, expected: Tensor, grad_norm: float, tolerances: Tolerances) -> TensorGap:
    """Compare a tensor's gradient, relative to its norm.

    Args:
        grad_norm: norm of the whole model's gradient. Deviations that are tiny compared to it are rounding.
    """
    norm, floor = _norm(expected), tolerances.gradient_floor * grad_norm
    bound = tolerances.gradient * norm + floor
    return _compare(name, f"the gradient of {_titled(name)}", found, expected, (max(norm, floor), "norm"), bound)


def _compare(
    name: str, title: str, found: Tensor, expected: Tensor, scale: tuple[float, str], bound: float
) -> TensorGap:
    """Compare a deviation's norm with ``bound``. The result is relative to ``scale``, a size and its name."""
    if found.shape != expected.shape:
        shapes = f"{tuple(found.shape)} instead of {tuple(expected.shape)}"
        return TensorGap(name, float("inf"), f"{title} has the shape {shapes}")
    deviation = found.double() - expected.double()
    size = _norm(deviation)
    relative = 0.0 if size == 0 else size / max(scale[0], 1e-30)
    if size <= bound:
        return TensorGap(name, relative, None)
    worst = int(deviation.abs().nan_to_num(nan=torch.inf).argmax())
    place = [int(index) for index in torch.unravel_index(torch.tensor(worst), deviation.shape)]
    values = f"{float(found.flatten()[worst]):.8g} instead of {float(expected.flatten()[worst]):.8g}"
    return TensorGap(name, relative, f"{title} deviates by {relative:.2e} of its {scale[1]}; most at {place}: {values}")


def _norm(tensor: Tensor) -> float:
    return float(tensor.double().norm())


def misplaced_tensor(name: str, problem: Literal["is missing", "should not exist"]) -> TensorGap:
    return TensorGap(name, float("inf"), f"{_titled(name)} {problem}")


def add_gaps(parity: Parity, of: Literal["gradients", "weights"], gaps: Sequence[TensorGap]) -> None:
    """Add the comparison of all gradients, or of all weights, to ``parity``.

    Names the first tensor in the model that differs, and of gradients also the last one: a fault in backward affects
    everything before it, so it is where the last one is.
    """
    setattr(parity, of, _largest(gap.relative for gap in gaps))
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
    """Return the sort key of a Hugging Face tensor: embedding, layers (each attention, then MLP), final norm, head."""
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
