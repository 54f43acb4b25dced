"""Finding a reward function by its registered name or by import path."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from slime_like.interfaces.reward import GROUP_MARK

RewardCallable = Callable[..., Any]
"""``reward(prompt: str, response: str, answer: str, **options) -> RewardResult``, or one of a whole group, which
``slime_like.interfaces.group_reward`` marks."""

REGISTERED: Mapping[str, str] = {
    "math_verify": "slime_like.sandbox.rewards.math_answer:math_verify",
    "format": "slime_like.sandbox.rewards.response_format:response_format",
    "length": "slime_like.sandbox.rewards.response_length:response_length",
    "http": "slime_like.sandbox.rewards.remote:remote",
    "majority": "slime_like.sandbox.rewards.majority:majority",
}
"""Functions that come with this package."""

SERVICE = "http"
"""Asks a service."""

LOCAL = frozenset(REGISTERED) - {SERVICE}
"""Those of them that compute their reward here, from response and answer alone."""

_GIVEN = ["prompt", "response", "answer"]
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)

_PURE = frozenset({"format", "length"})
"""Those that only look at their arguments, at once and with nothing to import."""


def resolve_reward(name: str) -> RewardCallable:
    """The function registered as ``name``, or the one at ``package.module:name``.

    Raises:
        ValueError: unknown name, an import path that leads nowhere, or something that is no function.
    """
    if name not in REGISTERED and ":" not in name:
        raise ValueError(f"unknown reward function {name!r}; use {', '.join(REGISTERED)} or `package.module:name`")
    module_name, _, attribute = REGISTERED.get(name, name).partition(":")
    try:
        function = getattr(import_module(module_name), attribute)
    except (ImportError, AttributeError) as error:
        raise ValueError(
            f"reward function {name!r} cannot be imported ({error}); give `package.module:name`"
        ) from error
    if not callable(function):
        raise ValueError(f"reward function {name!r} is a {type(function).__name__}; give a function")
    return function


def is_group_reward(function: RewardCallable) -> bool:
    """True where it is given all responses of a group at once."""
    return getattr(function, GROUP_MARK, False) is True


def check_options(name: str, function: RewardCallable, options: Mapping[str, Any]) -> None:
    """Raise ``ValueError`` unless the function takes exactly these options besides prompt, response and answer."""
    signature = inspect.signature(function)
    check_parameters(name, signature, is_group_reward(function))
    check_signature_options(name, signature, options)


def check_parameters(name: str, signature: inspect.Signature, of_groups: bool) -> None:
    """Raise ``ValueError`` unless prompt, response (or all responses) and answer can be given by position, and in
    this order: names that say another one would be given each other's values."""
    given = "prompt, responses and answer" if of_groups else "prompt, response and answer"
    names = [p.name for p in signature.parameters.values() if p.kind in _POSITIONAL][:3]
    meant = ["response" if name == "responses" else name for name in names]
    if sorted(meant) == sorted(_GIVEN) and meant != _GIVEN:
        raise ValueError(
            f"reward function {name!r} takes ({', '.join(names)}), but is given {given} by position; put its "
            "parameters in this order"
        )
    try:
        signature.bind_partial("", "", "")
    except TypeError as error:
        raise ValueError(
            f"reward function {name!r} takes {signature}, but is called with {given} before its options; give it these "
            "three parameters first"
        ) from error


def check_signature_options(name: str, signature: inspect.Signature, options: Mapping[str, Any]) -> None:
    """Raise ``ValueError`` unless these options fit, and all that are needed are among them."""
    try:
        signature.bind("", "", "", **options)
    except TypeError as error:
        takes = [str(p) for p in list(signature.parameters.values())[3:]]
        raise ValueError(
            f"options of reward function {name!r}: {error}; it takes {', '.join(takes) or 'none'}"
        ) from error


def try_options(name: str, function: RewardCallable, options: Mapping[str, Any]) -> None:
    """As ``check_options``, and functions that touch nothing but their arguments are called with the options once.

    What a service is to be asked with is looked at; the service is not asked.

    Raises:
        ValueError: the options do not fit, or the function cannot work with their values.
    """
    check_options(name, function, options)
    if name == SERVICE:
        # With it come http and ssl, which other functions never need.
        from slime_like.sandbox.rewards.remote import check_service

        check_service(**options)
    if name not in _PURE:
        return
    try:
        function("", "", "", **options)
    except (ArithmeticError, TypeError, ValueError, re.error) as error:
        raise ValueError(f"reward function {name!r} cannot work with them: {error}") from error
