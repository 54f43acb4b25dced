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


@pytest.mark.parametrize(("other", "fault"), [("format", {"fault": "response"}), ("judge", {})])
def test_responses_that_are_not_scored_are_what_the_ones_before_were(other: str, fault: dict[str, str]) -> None:
    budget = TimeBudget(5.0, workers=1, responses=512, shorten=True)
    for number in range(100):
        late = number == 50 and other == "judge"
        budget.record(HUNG | ({"function": "judge"} if late else {"function": "math_verify", "fault": "response"}))
    assert {name: text for name, text in budget.refusal.items() if name == "fault"} == fault
