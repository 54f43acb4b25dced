"""Off-policy corrections and reward shaping against their formulas, sequence by sequence."""

import math
import statistics
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from slime_like.algorithms import (
    GRPOLoss,
    build_loss,
    importance_weights,
    kl_penalty,
    off_policy_sequence_mask,
    overlong_penalty,
)
from slime_like.algorithms.importance import mean_weight
from slime_like.config.algorithm import AlgorithmConfig
from tests.unit.algorithms.test_losses import LENGTHS, make_inputs


def log_ratios(level: str) -> list[float]:
    """Return the log(pi_old / pi_behaviour) that applies to each loss-carrying token, in order."""
    inputs = make_inputs()
    difference = inputs.old_logprobs - inputs.behaviour_logprobs
    result = []
    for part, mask in zip(difference.split(LENGTHS), inputs.loss_mask.split(LENGTHS), strict=True):
        kept = part[mask].tolist()
        if level == "token":
            result += kept
        elif kept:
            total = sum(kept)
            result += [total if level == "sequence" else total / len(kept)] * len(kept)
    return result


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
@pytest.mark.parametrize("correction", ["truncate", "tis", "clip", "mask", "mis", "icepop"])
def test_importance_weights(correction: str, level: str) -> None:
    inputs = make_inputs()
    given = (inputs.old_logprobs, inputs.behaviour_logprobs, inputs.loss_mask, inputs.response_lens)
    weights, differ = importance_weights(*given, correction, level, low=0.8, high=1.1)
    ratios = [math.exp(x) for x in log_ratios(level)]
    if correction == "clip":
        expected, changed = [max(0.8, min(r, 1.1)) for r in ratios], [not 0.8 <= r <= 1.1 for r in ratios]
        assert 0.8 in expected or level != "token"
    elif correction in ("truncate", "tis"):
        expected, changed = [min(r, 1.1) for r in ratios], [r > 1.1 for r in ratios]
    else:
        expected, changed = [r if 0.8 <= r <= 1.1 else 0.0 for r in ratios], [not 0.8 <= r <= 1.1 for r in ratios]
    assert weights[inputs.loss_mask].tolist() == pytest.approx(expected, rel=1e-12)
    assert differ[inputs.loss_mask].tolist() == changed and any(changed)
    assert (weights[~inputs.loss_mask] == 1).all()


@pytest.mark.parametrize("correction", ["truncate", "mask"])
def test_a_ratio_on_a_bound_stays(correction: str) -> None:
    """The bounds are part of the interval. Weights have no graph, even if logprobs have one."""
    logprobs, mask = torch.zeros(2, requires_grad=True), torch.ones(2, dtype=torch.bool)
    weights, changed = importance_weights(logprobs, torch.zeros(2), mask, None, correction, low=1.0, high=1.0)
    assert weights.tolist() == [1.0, 1.0] and not changed.any() and not weights.requires_grad


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
@pytest.mark.parametrize("correction", ["truncate", "clip", "mask"])
def test_a_veto_removes_whole_sequences(correction: str, level: str) -> None:
    """A token's own ratio below 1e-4 (not at it) vetoes, if the token carries loss. Other weights stay."""
    log_ratios = torch.tensor([0.1, math.log(1e-4) - 1e-3, 0.2, 0.3, math.log(1e-4), -30.0, 0.1], dtype=torch.float64)
    mask = torch.tensor([True] * 5 + [False, True])
    lengths = torch.tensor([3, 2, 2])
    given = (log_ratios, torch.zeros(7, dtype=torch.float64), mask, lengths, correction, level)
    plain, vetoed = (importance_weights(*given, low=0.0, high=2.0, veto=veto) for veto in (None, 1e-4))
    assert vetoed[0][:3].tolist() == [0.0] * 3 and vetoed[1][:3].all()
    assert torch.equal(vetoed[0][3:], plain[0][3:]) and torch.equal(vetoed[1][3:], plain[1][3:]) and plain[0].all()


def test_the_mean_weight_counts_tokens_like_the_loss() -> None:
    weights, mask = torch.tensor([2.0, 0.5, 9.0, 1.0]), torch.tensor([True, True, False, True])
    assert mean_weight(weights, mask, torch.ones(4)) == pytest.approx(3.5 / 3)
    per_sample = torch.tensor([0.5, 0.5, 0.5, 1.0], dtype=torch.float64)  # reduction "samples": means per sequence
    assert mean_weight(weights, mask, per_sample) == pytest.approx((1.25 + 1.0) / 2)
    assert mean_weight(torch.zeros(4), mask, torch.ones(4)) == 1.0


@pytest.mark.parametrize("name", ["ppo_clip", "gspo", "cispo", "policy_gradient", "dro"])
def test_normalised_weights_average_one(name: str) -> None:
    """The policy loss of a batch of logits is divided by the mean weight; the KL term is not."""
    g = torch.Generator().manual_seed(1)
    logits = torch.randn(9, 7, generator=g, dtype=torch.float64).requires_grad_()
    targets, lengths = torch.randint(0, 7, (9,), generator=g), torch.tensor([4, 5])
    current = logits.log_softmax(-1).gather(1, targets[:, None])[:, 0].detach()
    noise = 0.3 * torch.randn(3, 9, generator=g, dtype=torch.float64)
    old, engine, reference = current + noise[0], current + noise[1], current + noise[2]
    advantages = torch.randn(9, generator=g, dtype=torch.float64)

    def run(**more: object) -> tuple[Tensor, Tensor]:
        config = AlgorithmConfig(loss=name, kl={"coef": 0.5}, importance={"correction": "tis", "high": 1.2, **more})
        recorded = {"old_logprobs": old, "behaviour_logprobs": engine, "response_lens": lengths}
        result = GRPOLoss(config)(logits, targets, reference, advantages, **recorded)
        return result[0] - 0.5 * result[2], result[1]

    mean = (old - engine).exp().clamp_max(1.2).mean()
    assert abs(mean - 1) > 0.01
    (plain, policy), (normalised, normalised_policy) = run(), run(normalize=True)
    assert normalised.item() == pytest.approx(plain.item() / mean.item())
    assert normalised_policy.item() == pytest.approx(policy.item() / mean.item())


def squared(ratio: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    return (ratio * ratio).clamp(low, high), torch.ones_like(ratio, dtype=torch.bool)


def broadcast(ratio: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    return ratio.mean(), ratio > high


def negative(ratio: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    return -ratio, ratio > high


def test_a_custom_correction() -> None:
    """A correction by import path. Its results are checked."""
    inputs, here = make_inputs(), "tests.unit.algorithms.test_importance"
    config = AlgorithmConfig(importance={"correction": f"{here}:squared", "high": 9.0}, loss="policy_gradient")
    rho = (inputs.old_logprobs - inputs.behaviour_logprobs).exp()
    expected = -(rho**2).clamp(0.5, 9.0) * inputs.advantages * inputs.logprobs * inputs.token_weights
    assert build_loss(config)(inputs).loss.item() == pytest.approx(expected[inputs.loss_mask].sum().item())
    for name in ("broadcast", "negative", "squard"):
        with pytest.raises(ValueError, match=r"unit\.algorithms\.test_importance"):
            build_loss(AlgorithmConfig(importance={"correction": f"{here}:{name}"}))(inputs)


def test_figures_of_a_correction() -> None:
    config = AlgorithmConfig(importance={"correction": "truncate", "high": 1.1})
    stats = build_loss(config)(make_inputs()).sums.to_stats(1.0, 0.0, 0.0)
    ratios = [math.exp(x) for x in log_ratios("token")]
    assert stats.importance_weight.item() == pytest.approx(statistics.mean(min(r, 1.1) for r in ratios))
    assert stats.importance_clipfrac.item() == pytest.approx(statistics.mean(r > 1.1 for r in ratios))
    for shift in (0.0, -0.5, 15.0):  # an estimate below 0, and a ratio whose square is beyond the bound of ratios
        inputs = make_inputs()
        moved = replace(inputs, behaviour_logprobs=inputs.behaviour_logprobs - shift)
        found = build_loss(config)(moved).sums.to_stats(1.0, 0.0, 0.0).engine_chi_square.item()
        squares = [math.exp(2 * (x + shift)) for x in log_ratios("token")]
        assert found == pytest.approx(statistics.mean(squares) - 1) and (shift >= 0 or found < 0)
    without = replace(make_inputs(), behaviour_logprobs=None)
    assert build_loss(AlgorithmConfig())(without).sums.to_stats(1.0, 0.0, 0.0).engine_chi_square == 0


def test_off_policy_sequence_mask() -> None:
    """Only a sequence that is far off-policy and has a negative advantage is masked, as a whole.

    The second's advantage is not negative, and the fourth is at the threshold.
    """
    lengths = torch.tensor([2, 3, 2, 2])
    gap = torch.tensor([0.5, 0.5, 0.5, 0.5, 9.0, 0.5, 0.5, 0.25, 0.25])
    mask = torch.tensor([True] * 4 + [False] + [True] * 4)
    logprobs = -torch.ones(9)
    for second in (1, 0):
        advantages = torch.tensor([-1.0, -1, second, second, second, -2, -2, -1, -1])
        keep = off_policy_sequence_mask(logprobs, logprobs + gap, advantages, mask, lengths, threshold=0.25)
        assert keep.tolist() == [False, False, True, True, True, False, False, True, True]


def test_the_off_policy_mask_uses_the_sampling_policy() -> None:
    """The engine's logprobs are used if there are any, otherwise the old policy's."""
    inputs = make_inputs()
    current, negative = inputs.logprobs.detach(), -inputs.advantages.abs()
    inputs = replace(inputs, old_logprobs=current, behaviour_logprobs=current + 0.5, advantages=negative)
    loss = build_loss(AlgorithmConfig(off_policy_mask=0.1))
    assert loss(inputs).loss == 0
    assert loss(replace(inputs, behaviour_logprobs=None)).loss != 0


def test_overlong_and_kl_penalties_of_the_reward() -> None:
    """All three branches of the published formula, with limit 20 and buffer 4."""
    lengths = torch.tensor([1, 16, 17, 18, 20, 25])
    assert overlong_penalty(lengths, 20, 4).tolist() == [0.0, 0.0, -0.25, -0.5, -1.0, -1.0]
    assert overlong_penalty(lengths, 20, 4, factor=2.0)[2].item() == -0.5
    inputs = make_inputs()
    given = (inputs.logprobs, inputs.ref_logprobs, inputs.loss_mask, inputs.response_lens)
    per_token, per_sequence = kl_penalty(*given, 0.1)
    expected = -0.1 * (inputs.logprobs - inputs.ref_logprobs).detach() * inputs.loss_mask
    assert not per_token.requires_grad and torch.allclose(per_token, expected)
    assert per_sequence.tolist() == pytest.approx([part.sum().item() for part in expected.split(LENGTHS)])
