"""No float32 logprob, including the -inf of a masked vocabulary, makes a loss, a gradient or a metric overflow."""

import itertools
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from slime_like.algorithms import (
    GRPOLoss,
    LossInputs,
    LossOutput,
    build_loss,
    importance,
    importance_weights,
    kl_estimate,
    kl_penalty,
    off_policy_sequence_mask,
)
from slime_like.algorithms.losses.kl import KL_ESTIMATORS, k3
from slime_like.config.algorithm import AlgorithmConfig
from slime_like.plugins import objective
from tests.support.properties import examples

INF = math.inf
LOGPROBS = st.one_of(
    st.floats(width=32, allow_nan=False), st.sampled_from([-INF, -1000.0, -88.8, -20.0, -0.0]), st.floats(-30, 0)
)
ALONE = [name for name in objective.LOSSES if name not in objective.STEP_LOSSES]
CORRECTIONS = sorted(importance.CORRECTIONS)
LEVELS = sorted(importance.LEVELS)
ESTIMATORS = sorted(KL_ESTIMATORS)
PARTS = st.sampled_from(list(itertools.product(CORRECTIONS, LEVELS, ESTIMATORS)))
ROWS = st.lists(st.tuples(*[LOGPROBS] * 4, st.sampled_from([-1.5, 0.0, 1.5])), min_size=2, max_size=4)
EXTREMES = [
    (0.0, -1000.0, 0.0, 0.0, 0.0),
    (-1000.0, 0.0, -1000.0, -1.0, -1.0),
    (-INF, -INF, -INF, -INF, 0.0),
    (-INF, -1.0, -2.0, -INF, -1.0),
    (3e38, -3e38, 3e38, -3e38, 1.0),
    (-3e38, 3e38, -3e38, 3e38, -1.0),
]


def loss_of(
    config: AlgorithmConfig, rows: Sequence[Sequence[float]], lengths: Sequence[int] = ()
) -> tuple[LossOutput, Tensor]:
    """Return loss and gradient of the current logprobs, for tokens (current, old, engine, reference, advantage)."""
    current, old, engine, reference, advantages = torch.tensor(list(rows), dtype=torch.float32).unbind(1)
    current = current.clone().requires_grad_()
    count = len(rows)
    inputs = LossInputs(
        logprobs=current,
        old_logprobs=old,
        behaviour_logprobs=engine,
        ref_logprobs=reference,
        advantages=advantages,
        loss_mask=torch.ones(count, dtype=torch.bool),
        token_weights=torch.ones(count),
        response_lens=torch.tensor(lengths or [1, count - 1]),
    )
    output = build_loss(config)(inputs)
    return output, torch.autograd.grad(output.loss, current, allow_unused=True)[0]


def is_finite(output: LossOutput, gradient: Tensor) -> bool:
    return all(bool(torch.isfinite(x).all()) for x in (output.loss, gradient, *output.sums.to_vectors()))


def require_finite(
    loss: str, rows: Sequence[Sequence[float]], parts: Sequence[str], lengths: Sequence[int] = ()
) -> None:
    correction, level, estimator = parts
    kl: dict[str, Any] = {"coef": 0.1, "importance_weighted": True, "estimator": estimator}
    importance = {"correction": correction, "level": level}
    config = AlgorithmConfig(loss=loss, kl=kl, importance=importance, off_policy_mask=0.1)
    assert is_finite(*loss_of(config, rows, lengths))


@pytest.mark.parametrize("loss", ALONE)
@given(ROWS, PARTS)
@examples(15)
def test_every_float32_gives_finite_numbers(loss: str, rows: list[tuple[float, ...]], parts: tuple[str, ...]) -> None:
    require_finite(loss, rows, parts)


def test_extremes_of_every_combination() -> None:
    """Every token is a sequence. The parts of a loss do not know each other."""
    for loss, part in itertools.product(ALONE, range(max(len(CORRECTIONS), len(ESTIMATORS)))):
        parts = [each[part % len(each)] for each in (CORRECTIONS, LEVELS, ESTIMATORS)]
        require_finite(loss, EXTREMES, parts, [1] * len(EXTREMES))
    for correction, level in itertools.product(CORRECTIONS, LEVELS):
        require_finite("ppo_clip", EXTREMES, [correction, level, "k3"], [1] * len(EXTREMES))


def test_flat_groups_and_far_policies() -> None:
    """A log ratio above 88 at advantage 0 once trained NaN."""
    for advantage, (current, old) in itertools.product((0.0, 1.0, -1.0), ((0.0, -1000.0), (-1000.0, 0.0))):
        for loss in ("ppo_clip", "gspo", "cispo"):
            rows = [(current, old, old, current, advantage), (-1.0, -1.0, -1.0, -1.0, 0.0)]
            output, gradient = loss_of(AlgorithmConfig(loss=loss), rows)
            assert is_finite(output, gradient)
            if loss != "cispo":  # clips its weight, never its gradient
                assert gradient[0] == 0
            assert output.sums.bounded == 1


@given(st.floats(-20, 20, width=32), st.floats(-9000, -50, width=32))
@example(20.0, -100.0)
@example(-20.0, -100.0)
@examples(15)
def test_inside_the_bound_nothing_changes(distance: float, old: float) -> None:
    """Loss and gradient are equal to the bit."""
    rows = [(old + distance, old, old, old, -1.0), (old, old, old, old, 0.0)]
    current, before = (torch.tensor(x, dtype=torch.float32) for x in (old + distance, old))
    difference = current - before
    output, gradient = loss_of(AlgorithmConfig(loss={"name": "ppo_clip", "clip_high": 0.0}), rows)
    if abs(float(difference)) <= 20:
        expected = torch.exp(difference)
        pessimistic = torch.maximum(expected, expected.clamp(0.8, 1.0))
        assert output.loss == pessimistic
        assert gradient[0] == (expected if expected >= 0.8 else 0)
        assert output.sums.bounded == 0
    k3 = kl_estimate(current, before, "k3")
    assert k3 == torch.expm1(-difference) + difference


def test_gradients_are_zero_where_a_bound_holds() -> None:
    """The bounds are d = -20 for k3 and -10,000 for every logprob. There are gradients just inside."""
    for estimator, d, expected in (("k3", -20.5, 0.0), ("k3", -19.5, 1 - math.exp(19.5)), ("k3", 900.0, 1.0)):
        leaf = torch.tensor([d], dtype=torch.float64, requires_grad=True)
        (gradient,) = torch.autograd.grad(kl_estimate(leaf, torch.zeros(1), estimator).sum(), leaf)
        assert gradient.item() == pytest.approx(expected)
    for loss in ("sft", "policy_gradient", "cispo"):
        rows = [(-10_001.0, -10_001.0, 0.0, 0.0, 1.0), (-9_999.0, -9_999.0, 0.0, 0.0, 1.0)]
        output, gradient = loss_of(AlgorithmConfig(loss=loss), rows)
        assert gradient.tolist() == [0.0, -1.0]
        assert output.loss.item() == 19_999.0


@given(st.lists(st.tuples(LOGPROBS, LOGPROBS), min_size=1, max_size=3))
@example([(-INF, -INF), (0.0, -INF), (-INF, 0.0)])
@examples(15)
def test_parts_called_directly(rows: list[tuple[float, float]]) -> None:
    one, other = torch.tensor(rows, dtype=torch.float32).unbind(1)
    mask, lengths = torch.ones(len(rows), dtype=torch.bool), torch.tensor([len(rows)])
    for correction, level in itertools.product(CORRECTIONS, LEVELS):
        weights, _ = importance_weights(one, other, mask, lengths, correction, level)
        assert torch.isfinite(weights).all()
    for estimator in ESTIMATORS:
        assert torch.isfinite(kl_estimate(one, other, estimator)).all()
        assert all(torch.isfinite(x).all() for x in kl_penalty(one, other, mask, lengths, 0.1, estimator))
    kept = off_policy_sequence_mask(one, other, -torch.ones(len(rows)), mask, lengths, 0.1)
    mean = sum(max(-1e4, min(1e4, b)) - max(-1e4, min(1e4, a)) for a, b in rows) / len(rows)
    assert bool(kept[0]) == (mean <= 0.1) or mean == pytest.approx(0.1, rel=1e-3)


@pytest.mark.parametrize("name", ALONE)
def test_a_masked_vocabulary(name: str) -> None:
    """Logits of -inf, even at a target, give finite losses and gradients."""
    logits = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
    forbidden = torch.zeros(4, 6, dtype=torch.bool)
    forbidden[:, 2] = forbidden[1, 3] = True
    leaf = logits.requires_grad_()
    targets = torch.tensor([0, 3, 2, 1])  # the second and third are forbidden
    config = AlgorithmConfig(loss=name, kl={"coef": 0.1}, entropy_coef=0.01)
    result = GRPOLoss(config)(
        leaf.masked_fill(forbidden, -INF),
        targets,
        torch.tensor([-1.0, -INF, -2.0, -3.0]),
        torch.tensor([1.0, -1.0, 0.0, 1.0]),
        old_logprobs=torch.tensor([-1.5, -INF, -1.0, -1.2]),
        response_lens=torch.tensor([2, 2]),
    )
    (gradient,) = torch.autograd.grad(result[0], leaf)
    assert torch.isfinite(result[0]) and torch.isfinite(gradient).all()
    assert not gradient[forbidden].any() and gradient[0].any()


def test_nan_stays_nan() -> None:
    """NaN logprobs of broken weights aren't bounded away, so trainers reject the loss."""
    for name in ALONE:
        assert not torch.isfinite(loss_of(AlgorithmConfig(loss=name), [(math.nan, -1, -1, -1, 1.0)] * 2)[0].loss)
    assert torch.isnan(k3(torch.tensor([math.nan]))).all()
