"""Cutting a rollout into training rows changes neither loss nor gradient, for any cuts and any order of the rows.

An append-only response is cut anywhere. Each row has everything before it as its prompt, and carries loss only on its
part. Uncut rollouts are the reference. The float64 model is causal: it reads all earlier tokens.
"""

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from torch import Tensor

from slime_like.algorithms import LossInputs, build_loss, pack_sequences, step_denominator, token_weights
from slime_like.config.algorithm import AlgorithmConfig
from slime_like.plugins.objective import LOSSES, SEQUENCE_LOSSES, STEP_LOSSES
from slime_like.trajectory import PackedTrajectory, ScoredTrajectory
from tests.support.properties import examples
from tests.support.rollout_rows import cut_into_rows, random_cuts
from tests.unit.algorithms.cases import (
    REDUCTIONS,
    SEEDS,
    VOCABULARY,
    batch,
    dense_scores,
    options_of,
    shapes,
)
from tests.unit.algorithms.test_invariance import weigh

OBJECTIVES: dict[str, dict[str, Any]] = {
    "ppo_clip": {"kl": {"coef": 0.2}, "entropy_coef": 0.05, "importance": {"correction": "truncate", "high": 1.5}},
    "cispo": {"loss": {"name": "cispo", "clip_low": 1.0}, "kl": {"coef": 0.1, "estimator": "k2"}},
    "policy_gradient": {"loss": "policy_gradient", "importance": {"correction": "mask"}},
}


class CausalModel:
    """Causal model: a token's state depends on the mean of all embeddings up to it, so a lost prefix shows."""

    def __init__(self) -> None:
        g = torch.Generator().manual_seed(0)
        self.embedding, self.mix, self.head = (
            torch.randn(rows, 6, generator=g, dtype=torch.float64).requires_grad_()
            for rows in (VOCABULARY, 6, VOCABULARY)
        )

    def scores(self, row: ScoredTrajectory) -> tuple[Tensor, Tensor]:
        """Return (response_len,) logprobs and entropies of one row."""
        embedded = self.embedding[torch.cat([row.prompt_tokens, row.response_tokens])]
        count = torch.arange(1, row.total_len + 1, dtype=torch.float64)[:, None]
        hidden = torch.tanh((embedded + embedded.cumsum(0) / count) @ self.mix)
        return dense_scores((hidden @ self.head.T)[row.prompt_len - 1 : -1] / row.temperature, row.response_tokens)


def step(rows: Sequence[ScoredTrajectory], config: AlgorithmConfig) -> list[Tensor]:
    """Return loss, policy and KL part, and gradients of one step in which each row is a micro-batch."""
    model, loss, denominator = CausalModel(), build_loss(config), weigh(rows, config.reduction.name)
    assert denominator is not None
    total, means = torch.zeros((), dtype=torch.float64), torch.zeros(3, dtype=torch.float64)
    for row in rows:
        pack = pack_sequences([row])
        logprobs, entropy = model.scores(row)
        output = loss(_inputs(pack, logprobs, entropy))
        total = total + output.loss
        means += torch.stack([output.sums.policy_loss, output.sums.kl_loss, output.sums.num_tokens])
    gradients = torch.autograd.grad(total / denominator, [model.embedding, model.mix, model.head])
    return [total.detach() / denominator, means / denominator, *gradients]


def _inputs(pack: PackedTrajectory, logprobs: Tensor, entropy: Tensor) -> LossInputs:
    others = pack.old_logprobs, pack.logprobs, pack.ref_logprobs, pack.advantages
    return LossInputs(logprobs, pack.loss_mask, pack.token_weights, entropy, *others)


def assert_same(found: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours - theirs).norm() <= 1e-10 * theirs.norm()


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("objective", OBJECTIVES)
@given(shapes=shapes(8, 40), seed=SEEDS)
@examples(4)
def test_rows_of_a_rollout_train_like_the_whole(
    reduction: str, objective: str, shapes: list[tuple[int, int]], seed: int
) -> None:
    """The rows are cut twice and shuffled. Some rows and rollouts carry no loss."""
    config = AlgorithmConfig(reduction={"name": reduction, **options_of(reduction)}, **OBJECTIVES[objective])
    rollouts, pick = batch(shapes, seed), random.Random(seed)
    rollouts[0].loss_mask[0] = True
    expected = step(rollouts, config)
    cuts = [random_cuts(rollout, pick) for rollout in rollouts]
    rows = [row for rollout, places in zip(rollouts, cuts, strict=True) for row in cut_into_rows(rollout, places)]
    assert_same(step(rows, config), expected)
    for rollout, places in zip(rollouts, cuts, strict=True):
        if uncut := sorted({*range(1, rollout.response_len)} - {*places}):
            places[:] = sorted([*places, pick.choice(uncut)])
    more = [row for rollout, places in zip(rollouts, cuts, strict=True) for row in cut_into_rows(rollout, places)]
    assert_same(step(pick.sample(more, len(more)), config), expected)


def test_a_published_example() -> None:
    """A has 50 + 100 tokens, B 3 x 30 and C 40, each with loss 1. Every rollout contributes a third of the mean.

    If rows were samples, B would contribute half of it.
    """
    counts, rollouts = [50, 100, 30, 30, 30, 40], list("AABBBC")
    weights = token_weights("samples", counts, [0] * 6, rollout_ids=rollouts)
    assert weights == [1 / 150, 1 / 150, 1 / 90, 1 / 90, 1 / 90, 1 / 40]
    assert step_denominator("samples", counts, [0] * 6, rollouts) == 3.0
    parts = {name: sum(w * n for w, n, r in zip(weights, counts, rollouts, strict=True) if r == name) for name in "ABC"}
    assert parts == pytest.approx({"A": 1.0, "B": 1.0, "C": 1.0})
    assert sum(parts.values()) / 3 == pytest.approx(1.0, rel=1e-15)


def test_rollouts_that_do_not_fit_are_rejected() -> None:
    with pytest.raises(ValueError, match="rollout id"):
        token_weights("tokens", [1, 2], [0, 0], rollout_ids=["a"])
    with pytest.raises(ValueError, match=r"row 1 of rollout 'a' is in group 1"):
        step_denominator("samples", [1, 2], [0, 1], ["a", "a"])


def test_settings_per_sequence() -> None:
    """Settings that need sequence lengths are listed by name. A level without a correction has no effect."""
    assert AlgorithmConfig(importance={"level": "sequence"}).per_sequence == ()
    corrected = {"correction": "mask", "veto": 1e-4, "level": "geometric"}
    assert AlgorithmConfig(importance=corrected).per_sequence == (
        "importance.level=geometric", "importance.veto=0.0001",
    )  # fmt: skip
    (row,) = batch([(3, 4)])
    pack = pack_sequences([row])
    for name in LOSSES.keys() - STEP_LOSSES:
        config = AlgorithmConfig(loss=name)
        inputs = _inputs(pack, torch.zeros(4), torch.zeros(4))
        if name in SEQUENCE_LOSSES:
            assert config.per_sequence == (f"loss={name}",)
            with pytest.raises(ValueError, match="response_lens"):
                build_loss(config)(inputs)
        else:
            assert config.per_sequence == () and build_loss(config)(inputs).loss.isfinite()
