"""Return values of reward functions."""

from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
import torch

from slime_like.interfaces import RewardResult
from slime_like.interfaces.user_code import as_result


@pytest.mark.parametrize(
    ("returned", "result"),
    [
        (RewardResult(0.5, False), RewardResult(0.5, False)),
        (1.0, RewardResult(1.0, True)),
        (0, RewardResult(0.0, False)),
        (-0.5, RewardResult(-0.5, False)),
        (True, RewardResult(1.0, True)),
        (np.float32(0.25), RewardResult(0.25, True)),
        (torch.tensor(2.0), RewardResult(2.0, True)),
        ((0.5, False), RewardResult(0.5, False)),
        ({"score": 0.5}, RewardResult(0.5, True)),
        ({"reward": -1, "success": True}, RewardResult(-1.0, True)),
        (OrderedDict(reward=0.0, score=3, why="late"), RewardResult(0.0, False, {"score": 3, "why": "late"})),
    ],
    ids=str,
)
def test_a_result_in_any_form(returned: Any, result: RewardResult) -> None:
    found = as_result(returned)
    assert RewardResult(float(found.reward), bool(found.success), found.metadata) == result


@pytest.mark.parametrize(
    "returned",
    [
        None, "1.0", b"1", [], [1.0], [0.0, 1.0], (1, 2, 3), {}, {"points": 1}, ("1", True), (1.0, None),
        {"score": "1"}, {1}, [[1], 2],
    ],
    ids=str,
)  # fmt: skip
def test_any_other_value_is_rejected(returned: Any) -> None:
    with pytest.raises(TypeError):
        as_result(returned)
