"""pass@k against counting every choice of k samples, and against the published product form."""

from itertools import combinations

import pytest

from slime_like.algorithms.pass_at_k import mean_pass_at_k, pass_at_k, powers_up_to


@pytest.mark.parametrize("n", [1, 2, 5, 7])
def test_every_choice_of_k_samples(n: int) -> None:
    for correct in range(n + 1):
        samples = [True] * correct + [False] * (n - correct)
        for k in range(1, n + 1):
            choices = list(combinations(samples, k))
            share = sum(any(choice) for choice in choices) / len(choices)
            assert pass_at_k(n, correct, k) == pytest.approx(share, abs=1e-12)


def test_many_samples_do_not_overflow() -> None:
    """Compare with the paper's code, 1 - prod(1 - k / i for i in n - c + 1 .. n)."""
    n, correct, k = 1000, 3, 100
    product = 1.0
    for i in range(n - correct + 1, n + 1):
        product *= 1 - k / i
    assert pass_at_k(n, correct, k) == pytest.approx(1 - product, rel=1e-12)


def test_mean_over_prompts() -> None:
    assert mean_pass_at_k([[True, False], [False, False]], 1) == 0.25
    assert mean_pass_at_k([[True, False], [False, False]], 2) == 0.5


def test_reported_k() -> None:
    assert [powers_up_to(n) for n in (1, 2, 3, 4, 6, 8)] == [[], [2], [2, 3], [2, 4], [2, 4, 6], [2, 4, 8]]
