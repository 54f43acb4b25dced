"""How failures are counted: in a row, or the first ones alone."""

import pytest

from slime_like.sandbox.failure_budget import FailureBudget


# outcomes (a number is so many failures at once, none a success), and after which of them a budget of 3 is exhausted
@pytest.mark.parametrize(
    ("outcomes", "first_only", "exhausted"),
    [
        ([1, 1, 1, 1], False, [False, False, True, True]),
        ([5, None, 2, 1], False, [True, False, False, True]),
        ([2, None, 1, 1], False, [False, False, False, False]),
        ([1, 1, 1], True, [False, False, True]),
        ([2, None, 9, 9], True, [False, False, False, False]),
    ],
)
def test_failures_in_succession(outcomes: list[int | None], first_only: bool, exhausted: list[bool]) -> None:
    budget, found = FailureBudget(3, first_only), []
    for count in outcomes:
        budget.record(count is None, count or 1)
        found.append(budget.exhausted)
    assert found == exhausted
