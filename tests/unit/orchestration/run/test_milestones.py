"""After which steps evaluation and checkpoints are due."""

import pytest

from slime_like.orchestration.run.milestones import is_due


@pytest.mark.parametrize(("every", "steps"), [(3, [3, 6, 9, 10]), (0, [10]), (5, [5, 10])])
def test_steps(every: int, steps: list[int]) -> None:
    assert [step for step in range(1, 11) if is_due(step, every, last=10)] == steps
