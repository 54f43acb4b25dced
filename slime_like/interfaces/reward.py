"""Results of reward functions, and the declaration of group functions."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

GROUP_MARK = "__group_reward__"

GroupFunction = TypeVar("GroupFunction", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class RewardResult:
    """One reward function's result for one response.

    Attributes:
        reward: finite number, unweighted.
        success: the function counts the sample as solved.
        metadata: anything that explains the reward; small, and JSON-serializable.

    Raises:
        TypeError: a field has another type. Raised here, so the traceback shows the line that made the result.
    """

    reward: float
    success: bool
    metadata: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, value, wanted in (("reward", self.reward, "a number"), ("success", self.success, "true or false")):
            try:
                math.isfinite(value)  # also accepts other libraries' numbers and bools
            except TypeError as error:
                raise TypeError(_of_another_kind(name, value, wanted)) from error
        if not isinstance(self.metadata, dict):
            raise TypeError(_of_another_kind("metadata", self.metadata, "a dict"))


def as_result(value: Any) -> RewardResult:
    """Convert a reward function's return value to a result.

    Args:
        value: a ``RewardResult``; a number (success: above 0) or a bool; ``(reward, success)``; a mapping with
            ``reward`` or ``score``, and ``success`` if it is not "above 0", whose other entries are metadata.

    Raises:
        TypeError: ``value`` is anything else.
    """
    if isinstance(value, RewardResult):
        return value
    if isinstance(value, Mapping) and (given := [key for key in ("reward", "score") if key in value]):
        rest = {str(key): item for key, item in value.items() if key not in (given[0], "success")}
        reward = value[given[0]]
        return replace(as_result((reward, value.get("success", _is_positive(reward)))), metadata=rest)
    if isinstance(value, tuple) and len(value) == 2:  # a list holds the rewards of several responses
        return RewardResult(*value)
    if isinstance(value, str | bytes | list | tuple | Mapping) or value is None:
        remedy = "return a number, (reward, success), a mapping with reward or score, or a RewardResult"
        raise TypeError(f"it returned {str(value)[:40]!r}, a {type(value).__name__}; {remedy}")
    return RewardResult(value, _is_positive(value))


def _is_positive(value: Any) -> bool:
    try:
        return bool(value > 0)
    except (TypeError, ValueError, RuntimeError):
        return False  # not a number: RewardResult reports it


def _of_another_kind(name: str, value: Any, wanted: str) -> str:
    return f"RewardResult.{name} is a {type(value).__name__} ({str(value)[:40]!r}); give {wanted}"


def group_reward(function: GroupFunction) -> GroupFunction:
    """Declare a reward function that receives all responses to one prompt together.

    Its signature is ``reward(prompt: str, responses: Sequence[str], answer: str, **options) -> list``. It returns one
    result per response, in order, of any kind that ``as_result`` accepts. If it raises, or takes longer than
    ``reward.timeout_s``, all rollouts of the group have failed.
    """
    setattr(function, GROUP_MARK, True)
    return function
