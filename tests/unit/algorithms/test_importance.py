"""Off-policy corrections and reward shaping against their formulas, sequence by sequence."""

import math
from dataclasses import replace

import pytest
import torch

from slime_like.algorithms import (
    build_loss,
    importance_weights,
    kl_penalty,
    off_policy_sequence_mask,
    overlong_penalty,
)
from slime_like.config.algorithm import AlgorithmConfig
from tests.support.rejections import Rejects
from tests.unit.algorithms.test_losses import LENGTHS, make_inputs

STARTS = [0, 5, 6]


def log_ratios(level: str) -> list[float]:
    """log(pi_old / pi_behaviour) that applies to each loss-carrying token, in order."""
    inputs = make_inputs()
    difference = inputs.old_logprobs - inputs.behaviour_logprobs
    result = []
    for start, n in zip(STARTS, LENGTHS, strict=True):
        kept = difference[start : start + n][inputs.loss_mask[start : start + n]].tolist()
        if level == "token":
            result += kept
        elif kept:
            total = sum(kept)
            result += [total if level == "sequence" else total / len(kept)] * len(kept)
    return result


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
@pytest.mark.parametrize("correction", ["truncate", "mask"])
def test_importance_weights(correction: str, level: str) -> None:
    inputs = make_inputs()
    result = importance_weights(
        inputs.old_logprobs,
        inputs.behaviour_logprobs,
        inputs.loss_mask,
        inputs.response_lens,
        correction,
        level,
        low=0.8,
        high=1.1,
    )
    ratios = [math.exp(x) for x in log_ratios(level)]
    if correction == "truncate":
        expected, changed = [min(r, 1.1) for r in ratios], [r > 1.1 for r in ratios]
    else:
        expected, changed = [r if 0.8 <= r <= 1.1 else 0.0 for r in ratios], [not 0.8 <= r <= 1.1 for r in ratios]
    assert result.weights[inputs.loss_mask].tolist() == pytest.approx(expected, rel=1e-12)
    assert result.changed[inputs.loss_mask].tolist() == changed and any(changed)
    assert (result.weights[~inputs.loss_mask] == 1).all()
    # Whatever the bounds left of it, the ratio itself is the level's.
    assert result.ratio[inputs.loss_mask].tolist() == pytest.approx(ratios, rel=1e-12)


@pytest.mark.parametrize("correction", ["truncate", "mask"])
def test_a_ratio_on_a_bound_stays(correction: str) -> None:
    """The bounds belong to the interval; and no weight has a graph, whatever went in."""
    logprobs, mask = torch.zeros(2, requires_grad=True), torch.ones(2, dtype=torch.bool)
    result = importance_weights(logprobs, torch.zeros(2), mask, None, correction, low=1.0, high=1.0)
    assert result.weights.tolist() == [1.0, 1.0] and not result.changed.any()
    assert not result.weights.requires_grad and not result.ratio.requires_grad


def test_the_off_policy_threshold_belongs_to_the_kept() -> None:
    two, mask, lens = torch.zeros(2), torch.ones(2, dtype=torch.bool), torch.tensor([1, 1])
    exactly = off_policy_sequence_mask(two, two + 0.5, torch.tensor([-1.0, 0.0]), mask, lens, threshold=0.5)
    beyond = off_policy_sequence_mask(two, two + 0.5, torch.tensor([-1.0, 0.0]), mask, lens, threshold=0.25)
    assert exactly.tolist() == [True, True] and beyond.tolist() == [False, True]


def test_correction_scales_the_policy_term_alone() -> None:
    """KL and entropy are of the current policy, independent of the sampler."""
    inputs = make_inputs()
    common = {"kl_coef": 0.3, "entropy_coef": 0.1}
    plain = build_loss(AlgorithmConfig(**common))(inputs)
    corrected = build_loss(AlgorithmConfig(**common, importance_correction="truncate", importance_high=1.1))(inputs)
    weights = torch.ones_like(inputs.token_weights)
    weights[inputs.loss_mask] = torch.tensor([min(math.exp(x), 1.1) for x in log_ratios("token")]).double()
    reweighted = build_loss(AlgorithmConfig())(replace(inputs, token_weights=inputs.token_weights * weights))
    rest = plain.loss - plain.sums.policy_loss
    assert corrected.loss.item() == pytest.approx((reweighted.loss + rest).item(), rel=1e-6)
    stats = corrected.sums.to_stats(1.0, 0.0, 0.0)
    assert stats.importance_weight.item() == pytest.approx(weights[inputs.loss_mask].mean().item(), rel=1e-6)
    assert 0 < stats.importance_clipfrac.item() < 1


def test_truncated_weights_are_unbiased_without_the_bound() -> None:
    """E over the engine's distribution of rho * f is E over the trainer's of f: summed exactly over all tokens."""
    torch.manual_seed(0)
    old, behaviour = (torch.randn(9, dtype=torch.float64).log_softmax(0) for _ in range(2))
    values = torch.randn(9, dtype=torch.float64)
    weights = importance_weights(
        old, behaviour, torch.ones(9, dtype=torch.bool), None, "truncate", high=float("inf")
    ).weights
    assert (behaviour.exp() * weights * values).sum().item() == pytest.approx((old.exp() * values).sum().item())


def test_off_policy_sequence_mask() -> None:
    """Only the sequence that is both far away and of negative advantage goes, as a whole."""
    lengths = torch.tensor([2, 3, 2, 2])
    gap = torch.tensor([0.5, 0.5, 0.5, 0.5, 9.0, 0.5, 0.5, 0.1, 0.1])
    advantages = torch.tensor([-1.0, -1, 1, 1, 1, -2, -2, -1, -1])
    mask = torch.tensor([True] * 4 + [False] + [True] * 4)
    logprobs = -torch.ones(9)
    keep = off_policy_sequence_mask(logprobs, logprobs + gap, advantages, mask, lengths, threshold=0.3)
    assert keep.tolist() == [False, False, True, True, True, False, False, True, True]


def test_off_policy_mask_in_the_loss(rejects: Rejects) -> None:
    inputs = make_inputs()
    inputs = replace(inputs, advantages=-inputs.advantages.abs(), behaviour_logprobs=inputs.behaviour_logprobs - 0.1)
    config = AlgorithmConfig(off_policy_mask=0.0)
    output = build_loss(config)(inputs)
    kept = inputs.loss_mask
    expected = 0.0
    for start, n in zip(STARTS, LENGTHS, strict=True):
        part = slice(start, start + n)
        mask = kept[part]
        gap = (inputs.behaviour_logprobs - inputs.logprobs)[part][mask]
        if mask.any() and inputs.advantages[start] < 0 and gap.mean() > 0:
            continue
        alone = build_loss(AlgorithmConfig())(replace(inputs, loss_mask=kept & _only(part)))
        expected += alone.loss.item()
    assert output.loss.item() == pytest.approx(expected)
    assert output.loss.item() != pytest.approx(build_loss(AlgorithmConfig())(inputs).loss.item())
    with rejects(ValueError):
        build_loss(AlgorithmConfig(loss="policy_gradient", off_policy_mask=0.1))(
            replace(inputs, old_logprobs=None, behaviour_logprobs=None)
        )


def test_the_off_policy_mask_looks_at_who_sampled() -> None:
    """The engine, where it said so; the old policy stands in for it only where it did not."""
    inputs = make_inputs()
    current, negative = inputs.logprobs.detach(), -inputs.advantages.abs()
    inputs = replace(inputs, old_logprobs=current, behaviour_logprobs=current + 0.5, advantages=negative)
    loss = build_loss(AlgorithmConfig(off_policy_mask=0.1))
    assert loss(inputs).loss == 0
    assert loss(replace(inputs, behaviour_logprobs=None)).loss != 0


def _only(part: slice) -> torch.Tensor:
    mask = torch.zeros(sum(LENGTHS), dtype=torch.bool)
    mask[part] = True
    return mask


def test_overlong_penalty(rejects: Rejects) -> None:
    """The three branches of the published formula: limit 20, buffer 4."""
    lengths = torch.tensor([1, 16, 17, 18, 20, 25])
    assert overlong_penalty(lengths, 20, 4).tolist() == [0.0, 0.0, -0.25, -0.5, -1.0, -1.0]
    assert overlong_penalty(lengths, 20, 4, factor=2.0)[2].item() == -0.5
    with rejects(ValueError):
        overlong_penalty(lengths, 20, 0)


def test_kl_penalty_in_the_reward() -> None:
    inputs = make_inputs()
    per_token, per_sequence = kl_penalty(
        inputs.logprobs, inputs.ref_logprobs, inputs.loss_mask, inputs.response_lens, 0.1
    )
    expected = -0.1 * (inputs.logprobs - inputs.ref_logprobs).detach() * inputs.loss_mask
    assert not per_token.requires_grad and torch.allclose(per_token, expected)
    assert per_sequence.tolist() == pytest.approx([part.sum().item() for part in expected.split(LENGTHS)])
