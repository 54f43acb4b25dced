"""Token weights and denominators against written-out means, and the vectorized sum of sample means."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slime_like.algorithms import kl_penalty, spread_over_tokens, step_denominator, sum_of_sample_mean, token_weights
from tests.support.properties import examples
from tests.unit.algorithms.cases import REDUCTIONS, mean_by_definition, options_of


@pytest.mark.parametrize("reduction", REDUCTIONS)
@given(
    rows=st.lists(st.tuples(st.integers(0, 20), st.integers(0, 8)), min_size=1, max_size=30),
    groups=st.lists(st.integers(0, 4), min_size=9, max_size=9),
    seed=st.integers(0, 99),
)
@examples(20)
def test_weighted_sum_is_the_mean(reduction: str, rows: list[tuple[int, int]], groups: list[int], seed: int) -> None:
    """The means are over rollouts, whose rows have any order. Without ids, every row is a rollout."""
    counts, rollouts = [count for count, _ in rows], [rollout for _, rollout in rows]
    group_ids, options = [groups[rollout] for rollout in rollouts], options_of(reduction)
    if not any(counts):
        with pytest.raises(ValueError, match="carries loss"):
            step_denominator(reduction, counts, group_ids, **options)
        return
    g = torch.Generator().manual_seed(seed)
    losses = [torch.randn(count, generator=g, dtype=torch.float64) for count in counts]
    in_tensor = torch.tensor(rollouts)
    for ids in (None, rollouts, in_tensor, list(in_tensor), [f"r{rollout}" for rollout in rollouts]):
        rows_of: dict[int, list[int]] = {}
        for row, rollout in enumerate(rollouts):
            rows_of.setdefault(row if ids is None else rollout, []).append(row)
        whole = [torch.cat([losses[row] for row in some]) for some in rows_of.values()]
        expected = mean_by_definition(whole, [group_ids[some[0]] for some in rows_of.values()], reduction).item()
        weights = token_weights(reduction, counts, group_ids, ids, **options)
        total = sum(w * x for w, row in zip(weights, losses, strict=True) for x in row.tolist())
        actual = total / step_denominator(reduction, counts, group_ids, ids, **options)
        assert actual == pytest.approx(expected, rel=1e-11, abs=1e-12)


def test_a_fully_masked_sample_adds_nothing() -> None:
    for reduction in REDUCTIONS:
        options = options_of(reduction)
        assert token_weights(reduction, [4, 0], [1, 2], **options)[1] == 0.0
        assert step_denominator(reduction, [4, 0], [1, 2], **options) == step_denominator(
            reduction, [4], [1], **options
        )
    counts, groups = [2, 4, 0, 6], [7, 7, 9, 9]
    in_tensors = torch.tensor(counts), torch.tensor(groups)
    for arguments in (in_tensors, tuple(map(list, in_tensors))):
        assert token_weights("groups", *arguments) == token_weights("groups", counts, groups)
        assert step_denominator("groups", *arguments) == 2.0


@given(
    lengths=st.lists(st.integers(1, 50), max_size=30), seed=st.integers(0, 99), kind=st.sampled_from(["bool", "float"])
)
@examples(20)
def test_sum_of_sample_mean(lengths: list[int], seed: int, kind: str) -> None:
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(sum(lengths), generator=g, dtype=torch.float64, requires_grad=True)
    masks = [torch.rand(n, generator=g) > 0.6 for n in lengths]
    expected = sum(
        (part[mask].mean() for part, mask in zip(x.split(lengths), masks, strict=True) if mask.any()), 0.0 * x.sum()
    )
    if kind == "bool":  # masked values have no effect
        masked = ~torch.cat([torch.zeros(0) > 0, *masks])
        actual = sum_of_sample_mean(x.masked_fill(masked, float("nan")), lengths, masks)
    else:
        actual = sum_of_sample_mean(x, torch.tensor(lengths).long(), [mask.double() for mask in masks])
    assert torch.allclose(actual, expected, rtol=1e-12, atol=1e-12)
    gradients = [torch.autograd.grad(y, x)[0] for y in (actual, expected)]
    assert torch.allclose(*gradients, rtol=1e-12, atol=1e-14)


def test_per_sequence_values_on_their_tokens() -> None:
    """Weights of `token_weights`, advantages with a graph, and masks of a whole pack in one tensor."""
    weights = token_weights("samples", [2, 0, 3], [0, 0, 1])
    spread = spread_over_tokens(weights, [3, 1, 3])
    assert spread.tolist() == [0.5] * 3 + [0.0] + [1 / 3] * 3 and spread.dtype == torch.float64
    advantages = torch.tensor([1.0, -1.0, 2.0], requires_grad=True)
    spread_over_tokens(advantages, torch.tensor([3, 1, 3])).sum().backward()
    assert advantages.grad is not None and advantages.grad.tolist() == [3.0, 1.0, 3.0]
    x, mask = torch.arange(7.0), torch.tensor([True, False, True, True, False, True, True])
    parts = list(mask.split([3, 1, 3]))
    assert sum_of_sample_mean(x, [3, 1, 3], mask) == sum_of_sample_mean(x, [3, 1, 3], parts) == 1 + 3 + 5.5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_adds_up(dtype: torch.dtype) -> None:
    """The sum of 4,096 equal values would stop growing in half precision."""
    values = torch.full((4096,), 0.1, dtype=dtype)
    mean = sum_of_sample_mean(values, [4096], [torch.ones(4096)])
    assert float(mean) == pytest.approx(float(values[0]), rel=1e-6)
    mask = torch.ones(4096, dtype=torch.bool)
    per_token, total = kl_penalty(values, torch.zeros_like(values), mask, torch.tensor([4096]), coefficient=1.0)
    assert float(total) == pytest.approx(float(per_token.double().sum()), rel=1e-6)
