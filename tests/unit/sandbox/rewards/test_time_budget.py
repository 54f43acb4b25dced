"""What hanging responses may cost: against a hand-made sequence of answers."""

import pytest

from slime_like.sandbox.rewards.time_budget import TimeBudget

SCORED, HUNG = {"samples": []}, {"reason": "timeout"}


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


def test_a_short_bound_is_named() -> None:
    budget = TimeBudget(5.0, workers=1, responses=512, shorten=True)
    answers = [budget.record(answer) for answer in [HUNG] * 9 + [SCORED]]
    assert [answer.get("detail") for answer in answers[:8]] == [None] * 8
    assert answers[8]["detail"] == "no answer within 0.5 s, after 8 timeouts in this step" and answers[9] is SCORED
