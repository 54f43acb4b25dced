"""The reward functions that come with this package, and finding one by name or by import path."""

import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any

from slime_like.plugins.resolve import resolve_callable
from slime_like.sandbox.rewards.signature import GIVEN, require_options

RewardCallable = Callable[..., Any]
"""``reward(prompt: str, response: str, answer: str, **options) -> RewardResult``, or one of a whole group, which
``slime_like.interfaces.group_reward`` marks."""

REGISTERED: Mapping[str, str] = {
    "math_verify": "slime_like.sandbox.rewards.math_answer:math_verify",
    "format": "slime_like.sandbox.rewards.response_shape:response_format",
    "length": "slime_like.sandbox.rewards.response_shape:response_length",
    "http": "slime_like.sandbox.rewards.remote:remote",
    "majority": "slime_like.sandbox.rewards.majority:majority",
    "exact_match": "slime_like.sandbox.rewards.final_answer:exact_match",
    "gsm8k": "slime_like.sandbox.rewards.final_answer:gsm8k",
    "multiple_choice": "slime_like.sandbox.rewards.letter_answer:multiple_choice",
    "json_schema": "slime_like.sandbox.rewards.json_answer:json_schema",
    "code": "slime_like.sandbox.rewards.code_tests:code_tests",
    "reasoning_gym": "slime_like.sandbox.rewards.task_answer:reasoning_gym",
    "judge": "slime_like.sandbox.rewards.judge:judge",
}

SERVICES = frozenset({"http", "judge"})

LOCAL = frozenset(REGISTERED) - SERVICES
"""Those that compute their reward here, from response and answer alone."""

QUICK = LOCAL - {"code", "majority", "reasoning_gym"}
"""Those that take milliseconds for a response that does not hang them."""

WARMED: Mapping[str, str] = {
    "math_verify": "1",
    "code": "assert True",
    "json_schema": "{}",
    "reasoning_gym": '{"task": "chain_sum", "question": "", "answer": "", "metadata": {}}',
}
"""Those whose first call takes long, or shows whether the machine can make it; with an answer for it."""

OF_ROWS = frozenset({"gsm8k", "multiple_choice", "json_schema", "code", "reasoning_gym"})
"""Those that need answers of a certain form."""

_PURE: Mapping[str, str] = {"format": "", "length": "", "exact_match": "", "gsm8k": "1", "multiple_choice": "A"}
"""Those that only look at their arguments, at once and with nothing to import; with an answer that each takes."""


def resolve_reward(name: str) -> RewardCallable:
    """The function registered as ``name``, or the one at ``package.module:name``. Raises ``ValueError``."""
    return resolve_callable("reward function", name, REGISTERED)


def try_options(name: str, function: RewardCallable, options: Mapping[str, Any]) -> None:
    """Raise ``ValueError`` where the options do not fit a registered function, or it cannot work with their values.

    Functions without side effects are called with them once. A service's request is checked; nothing is sent.
    """
    require_options(f"reward function {name!r}", inspect.signature(function), GIVEN, options)
    if name in SERVICES:
        _check_service(name, options)
    try:
        if name == "json_schema" and options.get("schema") is not None:
            function("", "", "", **options)
        elif name in _PURE:
            function("", "", _PURE[name], **options)
    except (ArithmeticError, TypeError, ValueError, re.error) as error:
        raise ValueError(f"reward function {name!r} cannot work with them: {error}") from error


def _check_service(name: str, options: Mapping[str, Any]) -> None:
    """With it come http and ssl, which other functions never need."""
    from slime_like.sandbox.rewards.judge import check_judge
    from slime_like.sandbox.rewards.remote import check_service

    (check_judge if name == "judge" else check_service)(**options)
