"""Advantage estimators, the value loss and pass@k against their formulas, written as plain Python."""

import random
import statistics
from itertools import combinations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from slime_like.algorithms import AdvantageEstimator, compute_advantages, find_estimator, gae, value_loss
from slime_like.algorithms.advantages import SampleGroups
from slime_like.plugins.objective import ADVANTAGES, BATCH_ADVANTAGES, GROUP_ADVANTAGES
from slime_like.statistics import mean_pass_at_k, pass_at_k, powers_up_to
from tests.support.properties import examples
from tests.unit.algorithms.cases import gae_by_definition

BY_GROUP = {
    "grpo": lambda r, g: (r - statistics.mean(g)) / statistics.stdev(g),
    "grpo_mean_only": lambda r, g: r - statistics.mean(g),
    "dr_grpo": lambda r, g: r - statistics.mean(g),
    "rloo": lambda r, g: r - (sum(g) - r) / (len(g) - 1),
    "pass_through": lambda r, g: r,
}


@pytest.mark.parametrize("name", BY_GROUP)
@given(
    groups=st.lists(st.lists(st.integers(-3, 3), min_size=1, max_size=9), min_size=1, max_size=9),
    seed=st.integers(0, 99),
)
@examples(15)
def test_group_formulas_on_uneven_shuffled_groups(name: str, groups: list[list[int]], seed: int) -> None:
    samples = [(10**15 + 7 * g, float(r), g) for g, group in enumerate(groups) for r in group]
    random.Random(seed).shuffle(samples)
    rewards = torch.tensor([r for _, r, _ in samples], dtype=torch.float64)
    actual = compute_advantages(rewards, [group_id for group_id, _, _ in samples], name)
    for value, (_, r, g) in zip(actual.tolist(), samples, strict=True):
        if name != "pass_through" and len(set(groups[g])) == 1:
            assert value == 0.0
        else:
            assert value == pytest.approx(BY_GROUP[name](r, [float(x) for x in groups[g]]), abs=1e-12)


def test_standard_deviations_of_groups_and_batches() -> None:
    rewards = [1.0, 0.0, 0.0, 3.0]
    actual = compute_advantages(torch.tensor(rewards), [1] * 4, ddof=0)
    expected = [(r - 1.0) / statistics.pstdev(rewards) for r in rewards]
    assert actual.tolist() == pytest.approx(expected)
    rewards, ids = [1.0, 0.0, 0.5, 2.0, 2.0], [1, 1, 1, 2, 2]
    plain = compute_advantages(torch.tensor(rewards), ids, "reinforce_pp").tolist()
    assert plain == pytest.approx([(r - statistics.mean(rewards)) / statistics.stdev(rewards) for r in rewards])
    centred = [0.5, -0.5, 0.0, 0.0, 0.0]
    baseline = compute_advantages(torch.tensor(rewards), ids, "reinforce_pp_baseline").tolist()
    assert baseline == pytest.approx([c / statistics.stdev(centred) for c in centred])
    assert baseline[3] == baseline[4] == 0.0


def of_one_function(rewards: Tensor, groups: list[int], name: str) -> Tensor:
    """Compute advantages of samples with one token each."""
    needed = {"tokens": torch.ones(len(rewards)), "functions": rewards[:, None], "weights": torch.ones(1)}
    needed |= {"greedy": torch.zeros(len(rewards)), "logprobs": -torch.ones(len(rewards))}
    needed["values"] = torch.zeros(len(rewards))
    lengths = torch.ones(len(rewards), dtype=torch.int64)
    return compute_advantages(rewards, groups, name, lengths, needed)


@pytest.mark.parametrize(
    "name", [n for n in ADVANTAGES if n not in ("pass_through", "remax") and find_estimator(n).level == "sample"]
)
def test_no_spread_means_exactly_zero(name: str) -> None:
    """Sums in different orders differ in the last bit, which isn't a signal. A group of one has no spread."""
    noisy = torch.tensor([0.1 + 0.2, 0.3, 0.15 + 0.15], dtype=torch.float64)
    assert len(set(noisy.tolist())) > 1
    assert of_one_function(noisy, [4, 4, 4], name).tolist() == [0.0, 0.0, 0.0]
    assert of_one_function(torch.tensor([5.0]), [4], name).tolist() == [0.0]


def test_small_spreads_and_half_precision() -> None:
    rewards = torch.tensor([1.0, 1.01])
    assert compute_advantages(rewards, [0, 0], eps=0.02).tolist() == [0.0, 0.0]
    assert compute_advantages(rewards, [0, 0], eps=0.005).abs().min() > 0.7
    assert compute_advantages(torch.tensor([0.0, 1.0]), [0, 0], eps=1.0).tolist() == [0.0, 0.0]
    rewards = [1000.0, 1001.0, 1003.0]
    expected = [(r - statistics.mean(rewards)) / statistics.stdev(rewards) for r in rewards]
    actual = compute_advantages(torch.tensor(rewards, dtype=torch.float16), [0, 0, 0])
    assert actual.dtype == torch.float16 and actual.tolist() == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("name", ADVANTAGES)
def test_group_estimators_give_0_for_groups_of_one(name: str) -> None:
    advantages = of_one_function(torch.tensor([0.0, 1.0, 3.0]), [1, 2, 3], name)
    assert bool((advantages == 0).all()) == (name in GROUP_ADVANTAGES)
    assert (find_estimator(name).scope == "batch") == (name in BATCH_ADVANTAGES)


DOUBLED = AdvantageEstimator(lambda rewards, groups: 2 * rewards, "group")
BARE = lambda rewards, groups: rewards  # noqa: E731


def test_import_paths_types_and_devices() -> None:
    assert compute_advantages(torch.tensor([3]), [0], f"{__name__}:DOUBLED").tolist() == [6.0]
    with pytest.raises(ValueError, match="declares no scope"):
        find_estimator(f"{__name__}:BARE")
    assert compute_advantages(torch.zeros(0, dtype=torch.int64), []).dtype == torch.float32
    assert compute_advantages(torch.zeros(0, dtype=torch.float64), []).dtype == torch.float64
    # The meta device represents a GPU. It can't count distinct ids, so the error shows that it was asked to.
    rewards = torch.zeros(2, device="meta", dtype=torch.float64)
    with pytest.raises(NotImplementedError, match="_unique2"):
        compute_advantages(rewards, [0, 0])
    with pytest.raises(NotImplementedError, match="_unique2"):  # the whole batch is one group
        find_estimator("reinforce_pp").compute(rewards, SampleGroups([0, 0]))


# ------------------------------------------------------------------------------------------------------------------ GAE
@given(lengths=st.lists(st.integers(1, 30), min_size=1, max_size=8), seed=st.integers(0, 10**6))
@examples(15)
def test_gae_against_the_definition(lengths: list[int], seed: int) -> None:
    """Random masks often end in masked tokens, and some cover a whole sequence."""
    g = torch.Generator().manual_seed(seed)
    total = sum(lengths)
    values = torch.randn(total, generator=g, dtype=torch.float64)
    rewards = torch.randn(len(lengths), generator=g, dtype=torch.float64)
    mask = torch.rand(total, generator=g) > 0.5
    advantages, returns = gae(rewards, values, mask, torch.tensor(lengths), gamma=0.97, lam=0.9)
    expected = []
    for r, v, m in zip(rewards.tolist(), values.split(lengths), mask.split(lengths), strict=True):
        expected += gae_by_definition(r, v.tolist(), m.tolist(), 0.97, 0.9)
    assert advantages.tolist() == pytest.approx(expected, abs=1e-12)
    assert torch.equal(returns, torch.where(mask, advantages + values, 0.0))


def test_gae_token_rewards() -> None:
    """Advantages have no graph, even if the values have one."""
    values, mask = torch.zeros(3, requires_grad=True), torch.tensor([True, False, True])
    rewards = torch.tensor([0.5, 9, 0.25])
    advantages, returns = gae(torch.ones(1), values, mask, torch.tensor([3]), lam=1.0, token_rewards=rewards)
    assert advantages.tolist() == [1.75, 0.0, 1.25]
    assert not advantages.requires_grad and not returns.requires_grad


# --------------------------------------------------------------------------------------------------------- value loss
def test_value_loss() -> None:
    """With the clip, a value that moves far doesn't lower the loss."""
    values = torch.tensor([1.0, 3.0, 0.0], dtype=torch.float64, requires_grad=True)
    old, returns = torch.zeros(3, dtype=torch.float64), torch.tensor([2.0, 2.0, 5.0], dtype=torch.float64)
    mask, weights = torch.tensor([True, True, False]), torch.tensor([0.5, 2.0, 9.0], dtype=torch.float64)
    plain, _ = value_loss(values, old, returns, mask, weights)
    assert plain.item() == pytest.approx(0.5 * (0.5 * 1 + 2.0 * 1))
    clipped, sums = value_loss(values, old, returns, mask, weights, clip=0.5)
    assert clipped.item() == pytest.approx(0.5 * (0.5 * 1.5**2 + 2.0 * 1.5**2))
    assert sums.clipped.item() == 2
    assert not torch.autograd.grad(clipped, values)[0].any()
    assert value_loss(values, old, returns, mask, weights, clip=9.0)[1].clipped.item() == 0  # a tie within the bound


def test_masked_values_and_rounding_change_no_figure() -> None:
    """NaN in any of the four tensors affects neither loss nor gradient."""
    mask = torch.tensor([True, False, True])
    clean = torch.tensor([[0.5, 0.7, -0.3], [0.1, 0.2, 0.3], [1.0, 2.0, 3.0], [1.0, 1.0, 1.0]])
    dirty = clean.masked_fill(~mask, float("nan")).requires_grad_()
    expected, found = (value_loss(*rows[:3], mask, rows[3], clip=0.2) for rows in (clean, dirty))
    assert torch.equal(found[0], expected[0]) and torch.equal(found[1].clipped, expected[1].clipped)
    (gradient,) = torch.autograd.grad(found[0], dirty)
    assert bool(torch.isfinite(gradient[0]).all()) and gradient[0, 1] == 0
    # In float32, an old value plus a change is often not the new value.
    values, old, returns = torch.randn(3, 4096, generator=torch.Generator().manual_seed(0)).tanh() * 0.14
    assert bool((old + (values - old) != values).any())
    mask, weights = torch.ones(4096, dtype=torch.bool), torch.ones(4096)
    assert value_loss(values, old, returns, mask, weights, clip=0.3)[1].clipped.item() == 0


def test_metrics_of_a_step_of_values() -> None:
    """Sums of two micro-batches give the metrics of both together; masked tokens and empty packs count nothing."""
    g = torch.Generator().manual_seed(0)
    values, old, returns, weights = (torch.randn(40, generator=g, dtype=torch.float64) for _ in range(4))
    mask = torch.rand(40, generator=g) < 0.7
    parts = [slice(0, 15), slice(15, 15), slice(15, 40)]
    rows = values, old, returns, mask, weights
    losses, sums = zip(*(value_loss(*(each[part] for each in rows), clip=0.2) for part in parts), strict=True)
    stats = sums[0].add(sums[1]).add(sums[2]).to_stats(4.0, 1.5, 0.1)
    error, moved = (returns - values)[mask], (values - old)[mask]
    wanted = {
        "loss": sum(loss.item() for loss in losses) / 4,
        "explained_variance": 1 - error.var(correction=0).item() / returns[mask].var(correction=0).item(),
        "values": values[mask].mean().item(),
        "returns": returns[mask].mean().item(),
        "clipfrac": sum(each.clipped.item() for each in sums) / int(mask.sum()),
        "old_gap_max": moved.abs().max().item(),
        "grad_norm": 1.5,
        "learning_rate": 0.1,
        "num_tokens": int(mask.sum()),
    }
    assert {name: float(getattr(stats, name)) for name in wanted} == pytest.approx(wanted)


def test_equal_returns_have_no_variance_to_explain() -> None:
    mask, weights = torch.ones(9, dtype=torch.bool), torch.ones(9)
    sums = value_loss(torch.randn(9), torch.zeros(9), torch.full((9,), 0.1), mask, weights)[1]
    assert float(sums.to_stats(1.0, 0.0, 0.0).explained_variance) == 0.0


@pytest.mark.parametrize("n", [1, 2, 5, 7])
def test_every_choice_of_k_samples(n: int) -> None:
    for correct in range(n + 1):
        samples = [True] * correct + [False] * (n - correct)
        for k in range(1, n + 1):
            choices = list(combinations(samples, k))
            share = sum(any(choice) for choice in choices) / len(choices)
            assert pass_at_k(n, correct, k) == pytest.approx(share, abs=1e-12)


def test_large_numbers_means_and_reported_k() -> None:
    """Compare with the paper's code, 1 - prod(1 - k / i for i in n - c + 1 .. n)."""
    n, correct, k = 1000, 3, 100
    product = 1.0
    for i in range(n - correct + 1, n + 1):
        product *= 1 - k / i
    assert pass_at_k(n, correct, k) == pytest.approx(1 - product, rel=1e-12)
    assert mean_pass_at_k([[True, False], [False, False]], 1) == 0.25
    assert mean_pass_at_k([[True, False], [False, False]], 2) == 0.5
    assert [powers_up_to(n) for n in (1, 2, 3, 4, 6, 8)] == [[], [2], [2, 3], [2, 4], [2, 4, 6], [2, 4, 8]]
