"""Further published losses, estimators and rejections against their formulas in Python, gradients by differences."""

import math
import statistics
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from slime_like.algorithms import LossInputs, build_loss, compute_advantages
from slime_like.algorithms.losses.loss import build_policy
from slime_like.config.algorithm import AlgorithmConfig
from slime_like.config.base import Part
from tests.unit.algorithms.test_losses import LENGTHS, make_inputs


# --------------------------------------------------------------------------------------------- tokens of a whole step
def covariances(logs: list[float], gains: list[float]) -> list[float]:
    means = statistics.mean(logs), statistics.mean(gains)
    return [(x - means[0]) * (y - means[1]) for x, y in zip(logs, gains, strict=True)]


def test_clip_cov_draws_tokens_between_two_covariances() -> None:
    generator = torch.Generator().manual_seed(0)
    logs, gains = (torch.randn(1000, generator=generator) for _ in range(2))
    each = torch.tensor(covariances(logs.tolist(), gains.tolist()))
    loss: Any = build_policy(Part.model_validate({"name": "clip_cov", "share": 0.01, "least": 0.5, "most": 1.5}))
    drawn = [loss.choose_tokens(logs, gains, torch.Generator().manual_seed(seed)) for seed in (1, 1, 2)]
    assert torch.equal(drawn[0], drawn[1]) and not torch.equal(drawn[0], drawn[2])
    for apart in drawn:
        assert apart.sum() == 10 and bool(((each[apart] > 0.5) & (each[apart] < 1.5)).all())
    assert loss.choose_tokens(logs[:9], torch.zeros(9), generator).sum() == 0  # no candidates


def test_kl_cov_takes_the_highest_covariances() -> None:
    generator = torch.Generator().manual_seed(0)
    logs, gains = (torch.randn(1000, generator=generator) for _ in range(2))
    each = covariances(logs.tolist(), gains.tolist())
    loss: Any = build_policy(Part.model_validate({"name": "kl_cov", "share": 0.01}))
    apart = loss.choose_tokens(logs, gains, generator)
    assert apart.nonzero().flatten().tolist() == sorted(sorted(range(1000), key=each.__getitem__)[-10:])


def test_chosen_tokens_lose_the_gradient_or_pay_for_moving() -> None:
    apart = torch.arange(sum(LENGTHS)) % 3 == 0
    inputs = replace(make_inputs(), fields={"chosen_tokens": apart})
    ratio = (inputs.logprobs.detach() - inputs.old_logprobs).exp()

    def gradient(name: str, **options: Any) -> Tensor:
        output = build_loss(AlgorithmConfig(loss={"name": name, **options}))(inputs)
        return torch.autograd.grad(output.loss, inputs.logprobs)[0]

    clipped = gradient("clip_cov", clip_low=0.1, clip_high=0.3)
    plain = gradient("ppo_clip", clip_low=0.1, clip_high=0.3)
    torch.testing.assert_close(clipped, plain.masked_fill(apart, 0.0))
    weights = torch.where(inputs.loss_mask, inputs.token_weights, 0.0)
    expected = weights * (-ratio * inputs.advantages + torch.where(apart, 0.7 * (ratio - 1), 0.0))
    torch.testing.assert_close(gradient("kl_cov", coef=0.7), expected)


# ----------------------------------------------------------------------------------------------------------- estimators
REWARDS = [1.0, 0.0, 0.5, 2.0, 2.0, 0.25, 0.5, 0.5]
GROUPS = [3, 3, 3, 9, 9, 9, 4, 4]


def of_groups(formula: Callable[[list[float], list[int]], list[float]]) -> list[float]:
    """Apply a formula of a group's rewards and rows to every group."""
    found = [0.0] * len(GROUPS)
    for group in dict.fromkeys(GROUPS):
        rows = [row for row, each in enumerate(GROUPS) if each == group]
        for row, value in zip(rows, formula([REWARDS[row] for row in rows], rows), strict=True):
            found[row] = value
    return found


def standardized(values: list[float]) -> list[float]:
    if max(values) - min(values) <= 1e-6:
        return [0.0] * len(values)
    return [(each - statistics.mean(values)) / statistics.stdev(values) for each in values]


def test_opo_weighs_the_baseline_by_length() -> None:
    tokens = [4, 1, 7, 2, 9, 3, 5, 5]

    def formula(rewards: list[float], rows: list[int]) -> list[float]:
        lengths = [tokens[row] for row in rows]
        baseline = sum(n * r for n, r in zip(lengths, rewards, strict=True)) / sum(lengths)
        return [r - baseline for r in rewards]

    found = compute_advantages(torch.tensor(REWARDS), GROUPS, "opo", given={"tokens": torch.tensor(tokens)})
    assert found.tolist() == pytest.approx(of_groups(formula), abs=1e-7)
    assert found.tolist()[-2:] == [0.0, 0.0]
    without = {"tokens": torch.tensor([4, 1, 0, 0])}  # no sample of the second group carries loss
    assert compute_advantages(torch.tensor([1.0, 0.0] * 2), [0, 0, 1, 1], "opo", given=without)[2:].tolist() == [0, 0]


def test_pass_at_k_credits_only_a_single_best_sample() -> None:
    def formula(rewards: list[float], rows: list[int]) -> list[float]:
        others = [max(rewards[:i] + rewards[i + 1 :]) for i in range(len(rewards))]
        return [max(rewards) - other for other in others]

    found = compute_advantages(torch.tensor(REWARDS), GROUPS, "pass_at_k").tolist()
    assert found == of_groups(formula) == [0.5, 0, 0, 0, 0, 0, 0, 0]


def test_gpg_makes_up_for_groups_without_spread() -> None:
    centred = of_groups(lambda rewards, _: [r - statistics.mean(rewards) for r in rewards])
    found = compute_advantages(torch.tensor(REWARDS), GROUPS, "gpg").tolist()
    assert found == pytest.approx([8 / 6 * each for each in centred])
    precise = compute_advantages(torch.tensor(REWARDS).double(), GROUPS, "gpg")
    assert precise.tolist() == pytest.approx([8 / 6 * each for each in centred], rel=1e-14)
    assert compute_advantages(torch.ones(4), [0, 0, 1, 1], "gpg").tolist() == [0.0] * 4


def test_gdpo_normalizes_every_function_by_itself() -> None:
    functions = torch.tensor([[each, 100 * (i % 3)] for i, each in enumerate(REWARDS)], dtype=torch.float64)
    weights = torch.tensor([1.0, 0.5], dtype=torch.float64)
    given = {"functions": functions, "weights": weights}
    found = compute_advantages(functions @ weights, GROUPS, "gdpo", given=given).tolist()
    summed = [0.0] * len(GROUPS)
    for column, weight in zip(functions.T.tolist(), weights.tolist(), strict=True):
        each = of_groups(lambda _, rows, column=column: standardized([column[row] for row in rows]))
        summed = [total + weight * one for total, one in zip(summed, each, strict=True)]
    assert found == pytest.approx(standardized(summed), abs=1e-12)


TURN_REWARDS = {"a": [1.0, 0.0, 2.0], "b": [0.5], "c": [0.0, 3.0]}


@pytest.mark.parametrize("gamma", [0.9, 1.0])
def test_a_turn_gets_its_return_minus_the_others_whole_returns(gamma: float) -> None:
    def to_go(rewards: list[float]) -> list[float]:
        return [sum(gamma**j * r for j, r in enumerate(rewards[k:])) for k in range(len(rewards))]

    whole = {name: to_go(rewards)[0] for name, rewards in TURN_REWARDS.items()}
    expected = [
        each - statistics.mean(value for other, value in whole.items() if other != name)
        for name, rewards in TURN_REWARDS.items()
        for each in to_go(rewards)
    ]
    lengths = torch.tensor([len(rewards) for rewards in TURN_REWARDS.values()])
    flat = torch.tensor([r for rewards in TURN_REWARDS.values() for r in rewards], dtype=torch.float64)
    discount = {} if gamma == 1.0 else {"gamma": gamma}
    found = compute_advantages(flat, [1, 1, 1], "turn_rloo", lengths, **discount)
    assert found.tolist() == pytest.approx(expected, abs=1e-12)
    by_index = compute_advantages(flat, [1, 1, 1], "turn_index_mean", lengths, **discount).tolist()
    seconds = [to_go(rewards)[1] for rewards in TURN_REWARDS.values() if len(rewards) > 1]
    assert by_index[1] == pytest.approx(seconds[0] - statistics.mean(seconds)) and by_index[2] == 0.0


def test_remax_subtracts_the_greedy_reward() -> None:
    given = {"greedy": torch.tensor([0.5, 0.5, -1.0])}
    assert compute_advantages(torch.tensor([1.0, 0.0, 2.0]), [7, 7, 9], "remax", given=given).tolist() == [0.5, -0.5, 3]


TOKEN_REWARDS = {7: [[0.0, 1.0, 0.0, 2.0], [0.5], [0.0, 3.0]], 9: [[1.0, 2.0], []], 4: [[5.0]]}
"""Rewards of the tokens of each sample, by group."""
PROBABILITIES = {7: [[0.5, 1.0, 0.125, 0.25], [0.75], [1.0, 0.3]], 9: [[0.5, 0.5], []], 4: [[0.5]]}


def test_a_token_gets_its_return_minus_the_others_weighted_by_energy() -> None:
    """Beyond the last token of the others, their last baseline holds. Nothing is known of a sample without others."""
    expected = []
    for group, rewards in TOKEN_REWARDS.items():
        for own, each in enumerate(rewards):
            others = [other for other in range(len(rewards)) if other != own and rewards[other]]
            for t in range(len(each)):
                at = min(t, max((len(rewards[other]) for other in others), default=0) - 1)
                reaching = [other for other in others if len(rewards[other]) > at]
                weights = [sum(1 - p for p in PROBABILITIES[group][other][: at + 1]) for other in reaching]
                later = [sum(rewards[other][at:]) for other in reaching]
                weights = weights if any(weights) else [1.0] * len(weights)
                total = sum(w * g for w, g in zip(weights, later, strict=True))
                expected.append(sum(each[t:]) - total / sum(weights) if reaching else 0.0)
    flat = torch.tensor([r for g in TOKEN_REWARDS.values() for each in g for r in each], dtype=torch.float64)
    given = {"logprobs": torch.tensor([p for g in PROBABILITIES.values() for each in g for p in each]).double().log()}
    lengths = torch.tensor([len(each) for g in TOKEN_REWARDS.values() for each in g])
    ids = [group for group, each in TOKEN_REWARDS.items() for _ in each]
    found = compute_advantages(flat, ids, "optimal_token_baseline", lengths, given)
    assert found.tolist() == pytest.approx(expected, abs=1e-9)


def test_an_estimator_says_what_it_needs() -> None:
    with pytest.raises(ValueError, match="'opo' needs tokens"):
        compute_advantages(torch.tensor(REWARDS), GROUPS, "opo")


# ------------------------------------------------------------------------------------------------------------ rejection
def divergences(inputs: LossInputs, estimator: str) -> list[list[float]]:
    """Return KL(engine || trainer) of every loss-carrying token, by sequence."""
    found: list[list[float]] = []
    start = 0
    for length in LENGTHS:
        rows = slice(start, start + length)
        start += length
        logs = (inputs.behaviour_logprobs - inputs.old_logprobs)[rows][inputs.loss_mask[rows]].tolist()
        found.append([x * x / 2 if estimator == "k2" else math.exp(-x) - 1 + x for x in logs])
    return found


@pytest.mark.parametrize("estimator", ["k2", "k3"])
@pytest.mark.parametrize("over", ["sum", "mean", "max"])
def test_rejected_sequences_carry_no_loss(estimator: str, over: str) -> None:
    inputs = make_inputs()
    combine = {"sum": sum, "mean": statistics.mean, "max": max}[over]
    each = [combine(values) if values else 0.0 for values in divergences(inputs, estimator)]  # type: ignore[operator]
    bound = sorted(each)[1] * 1.001  # rejects the largest only
    settings: dict[str, Any] = {"kl": {"coef": 0.1}, "entropy_coef": 0.1}
    rejection = {"estimator": estimator, "over": over, "bound": bound}
    output = build_loss(AlgorithmConfig(**settings, rejection=rejection))(inputs)
    kept = torch.tensor([value <= bound for value in each]).repeat_interleave(torch.tensor(LENGTHS))
    expected = build_loss(AlgorithmConfig(**settings))(replace(inputs, loss_mask=inputs.loss_mask & kept))
    assert kept.sum() < len(kept) and torch.equal(output.loss, expected.loss)
    assert output.sums.num_tokens == (inputs.loss_mask & kept).sum()
    assert output.sums.rejected == (inputs.loss_mask & ~kept).sum()
    gradients = (torch.autograd.grad(each.loss, inputs.logprobs)[0] for each in (output, expected))
    torch.testing.assert_close(*gradients, rtol=0, atol=0)


def test_the_straight_through_kl_has_one_estimators_value_and_another_ones_gradient() -> None:
    inputs = make_inputs()

    def kl(**settings: Any) -> tuple[float, Tensor]:
        config = AlgorithmConfig(loss="policy_gradient", kl={"coef": 1.0, **settings})
        output = build_loss(config)(replace(inputs, advantages=torch.zeros_like(inputs.token_weights)))
        return output.loss.item(), torch.autograd.grad(output.loss, inputs.logprobs)[0]

    value, gradient = kl(estimator="k3", straight_through=True)
    assert value == pytest.approx(kl(estimator="k3")[0], rel=1e-12)
    torch.testing.assert_close(gradient, kl(estimator="k2")[1])
