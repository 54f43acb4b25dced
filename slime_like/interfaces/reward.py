"""Results of reward functions, and the declaration of group functions."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

GROUP_MARK = "__group_reward__"

GroupFunction = TypeVar("GroupFunction", bound="Callable[..., list[RewardResult]]")


@dataclass(frozen=True, slots=True)
class RewardResult:
    """One reward function's result for one response.

    Attributes:
        reward: finite number, unweighted.
        success: the function counts the sample as solved.
        metadata: whatever explains the reward; small, and expressible in JSON.

    Raises:
        TypeError: a field has another type. Raised here, where the traceback has the line that made the result.
    """

    reward: float
    success: bool
    metadata: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, value, wanted in (("reward", self.reward, "a number"), ("success", self.success, "true or false")):
            try:
                math.isfinite(value)  # takes what other libraries call a number or a bool, too
            except TypeError as error:
                raise TypeError(_of_another_kind(name, value, wanted)) from error
        if not isinstance(self.metadata, dict):
            raise TypeError(_of_another_kind("metadata", self.metadata, "a dict"))


def _of_another_kind(name: str, value: Any, wanted: str) -> str:
    return f"RewardResult.{name} is a {type(value).__name__} ({str(value)[:40]!r}); give {wanted}"


def group_reward(function: GroupFunction) -> GroupFunction:
    """Declares a reward function that is given all responses to one prompt at once.

    ``reward(prompt: str, responses: Sequence[str], answer: str, **options) -> list[RewardResult]``, one result for each
    response, in their order. If it raises, or takes longer than ``reward.timeout_s``, the whole group gets reward 0.
    """
    setattr(function, GROUP_MARK, True)
    return function
