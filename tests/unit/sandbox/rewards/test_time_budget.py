"""The time that hanging responses may cost, for a sequence of answers made by hand."""

import pytest

from slime_like.sandbox.rewards.failures import TimeBudget

HUNG = {"reason": "timeout"}


@pytest.mark.parametrize(("shorten", "bounds"), [(True, [5.0] * 16 + [0.5] * 184), (False, [5.0] * 200)])
def test_a_step_of_hostile_answers(shorten: bool, bounds: list[float]) -> None:
    """Two workers: 16 whole timeouts, 184 short ones, then nothing, until the next step's responses."""
    budget, found = TimeBudget(5.0, workers=2, responses=512, shorten=shorten), []
    for _ in range(512):
        found.append(budget.timeout_s)
        assert budget.record(HUNG if budget.timeout_s else budget.refusal)["reason"] == (
            "timeout" if found[-1] else "budget"
        )
    assert found == bounds + [0.0] * 312
    assert budget.timeout_s == 5.0
