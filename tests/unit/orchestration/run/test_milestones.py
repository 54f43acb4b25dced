"""The summary of a run."""

import pytest

from slime_like.observability.names import ACCURACY
from slime_like.orchestration.run.milestones import accuracy_change


@pytest.mark.parametrize(
    ("steps", "comparable", "expected"),
    [
        ([0, 3, 6], True, (0.0, 0.6)),
        ([0], True, (0.0, 0.0)),
        ([0, 3], False, (None, 0.3)),
        ([6], True, (None, 0.6)),  # the run began with another run's checkpoint
        ([], True, (None, None)),
    ],
)
def test_accuracy_before_is_that_of_step_0(
    steps: list[int], comparable: bool, expected: tuple[float | None, float | None]
) -> None:
    records = [{"step": step, ACCURACY: step / 10} for step in steps]
    assert accuracy_change(records, comparable) == expected
