"""Checks that workers can call a function with its options."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from slime_like.plugins.resolve import require_options

GIVEN = ("prompt", "response", "answer")
ROW = "row"
"""Parameter of custom functions that receives the whole row of the data."""
_OF_OTHERS = frozenset(
    ("prompts", "completions", "completion_ids", "data_source", "solution_str", "ground_truth", "queries", "labels")
)
"""First parameters of reward functions for TRL, verl and OpenRLHF, which pass other values by position."""


def require_reward(name: str, function: Callable[..., Any], options: Mapping[str, Any]) -> None:
    """Raise ``ValueError`` unless ``function`` can be called as a reward, with these options.

    Names of parameters that would receive each other's values, or that other frameworks fill, are rejected.
    """
    if inspect.iscoroutinefunction(function):
        raise ValueError("it is an `async def`, which is not supported; write it as a plain `def`")
    signature = inspect.signature(function)
    names = list(signature.parameters)[:3]
    meant = ["response" if name == "responses" else name for name in names]
    if not _OF_OTHERS.isdisjoint(names) or (sorted(meant) == sorted(GIVEN) and meant != list(GIVEN)):
        raise ValueError(f"it takes ({', '.join(names)}), but receives {', '.join(GIVEN)} by position; take these")
    given = {ROW: None} if takes_row(function, options) else {}
    require_options(f"reward function {name!r}", function, {**options, **given}, GIVEN)


def takes_row(function: Callable[..., Any], options: Mapping[str, Any]) -> bool:
    """Return whether the function has a parameter for the row that its options do not set."""
    return ROW in inspect.signature(function).parameters and ROW not in options
