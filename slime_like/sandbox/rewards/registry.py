"""Included reward functions, and the lookup of a function by name or import path."""

import inspect
import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from slime_like.plugins.resolve import may_have_parameter, require_options, resolve_callable

if TYPE_CHECKING:
    from slime_like.config import RewardConfig

GIVEN = ("prompt", "response", "answer")
ROW = "row"
"""Parameter of custom functions that receives the whole row of the data."""
_OF_OTHERS = frozenset(
    ("prompts", "completions", "completion_ids", "data_source", "solution_str", "ground_truth", "queries", "labels")
)
"""First parameters of reward functions for TRL, verl and OpenRLHF, which pass other values by position."""

RewardCallable = Callable[..., Any]
"""``reward(prompt: str, response: str, answer: str, **options) -> RewardResult``, or a function of a whole group,
marked with ``slime_like.interfaces.group_reward``."""

REGISTERED: Mapping[str, str] = {
    "math_verify": "slime_like.sandbox.rewards.math_answer:math_verify",
    "format": "slime_like.sandbox.rewards.answers:response_format",
    "length": "slime_like.sandbox.rewards.answers:response_length",
    "http": "slime_like.sandbox.rewards.services:remote",
    "majority": "slime_like.sandbox.rewards.answers:majority",
    "exact_match": "slime_like.sandbox.rewards.answers:exact_match",
    "gsm8k": "slime_like.sandbox.rewards.answers:gsm8k",
    "multiple_choice": "slime_like.sandbox.rewards.answers:multiple_choice",
    "json_schema": "slime_like.sandbox.rewards.answers:json_schema",
    "code": "slime_like.sandbox.rewards.code_tests:code_tests",
    "reasoning_gym": "slime_like.sandbox.rewards.answers:reasoning_gym",
    "judge": "slime_like.sandbox.rewards.services:judge",
}

SERVICES = frozenset({"http", "judge"})

LOCAL = frozenset(REGISTERED) - SERVICES
"""Functions that compute their reward in the worker, from response and answer only."""

QUICK = LOCAL - {"code", "majority", "reasoning_gym"}
"""Functions that take milliseconds for a response that does not hang them."""

OF_ROWS = frozenset({"gsm8k", "multiple_choice", "json_schema", "code", "reasoning_gym"})
"""Functions that need answers of a certain form."""

WITHOUT_ANSWER = frozenset({"format", "length", "majority", *SERVICES})
"""Functions that can work without an answer."""

EASY_ANSWERS: Mapping[str, str] = {
    "math_verify": "1",
    "gsm8k": "1",
    "multiple_choice": "A",
    "json_schema": "{}",
    "code": "assert True",
    "reasoning_gym": '{"task": "chain_sum", "question": "", "answer": "", "metadata": {}}',
}
"""Answers for a first call of functions that reject an empty one."""

WARMED = frozenset({"math_verify", "json_schema", "code", "reasoning_gym"})
"""Functions that need a first call: it takes long, or shows whether this machine can run them."""


def require_reward(name: str, function: RewardCallable, options: Mapping[str, Any]) -> None:
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


def takes_row(function: RewardCallable, options: Mapping[str, Any]) -> bool:
    """Return whether the function has a parameter for the row that its options do not set."""
    return ROW in inspect.signature(function).parameters and ROW not in options


def resolve_reward(name: str) -> RewardCallable:
    """Return the function registered as ``name``, or the function at ``package.module:name``. Raises ``ValueError``."""
    return resolve_callable("reward function", name, REGISTERED)


def required_of_rows(reward: "RewardConfig", has_agent: bool) -> dict[str, Any]:
    """Return the arguments of ``RowEncoder`` with which rows have what the run's rewards and agents read."""
    names = [function.name for function in reward.functions]
    asks = any(":" in name and may_have_parameter(name, ROW) for name in names)
    needs_answer = not WITHOUT_ANSWER.issuperset(names)
    return {"keep_messages": has_agent, "need_answer": needs_answer, "keep_row": asks}


def try_options(name: str, function: RewardCallable, options: Mapping[str, Any]) -> None:
    """Raise ``ValueError`` if a registered function does not take the options, or cannot work with their values.

    Functions without side effects are called once. For a service, only the request is checked; nothing is sent.
    """
    require_options(f"reward function {name!r}", function, options, GIVEN)
    if name in SERVICES:
        from slime_like.sandbox.rewards.services import check_service  # it imports http and ssl

        check_service(**options)
    try:
        if name in QUICK - {"math_verify"}:  # which is slow to import
            function("", "", EASY_ANSWERS.get(name, ""), **options)
    except (ArithmeticError, TypeError, ValueError, re.error) as error:
        raise ValueError(f"reward function {name!r} cannot work with them: {error}") from error
