"""Check that workers can call a function: its parameters, their order, and its options."""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from slime_like.interfaces.reward import GROUP_MARK
from slime_like.plugins.traceback import code_of

GIVEN = ("prompt", "response", "answer")
_OF_OTHERS = frozenset(
    ("prompts", "completions", "completion_ids", "data_source", "solution_str", "ground_truth", "queries", "labels")
)
"""First parameters of reward functions for TRL, verl and OpenRLHF, which pass other values by position."""


def is_group_reward(function: Callable[..., Any]) -> bool:
    """Return whether the function receives all responses of a group at once."""
    return getattr(function, GROUP_MARK, False) is True


def signature_problems(
    field: str, name: str, function: Callable[..., Any], options: Mapping[str, Any]
) -> Iterator[str]:
    """Yield why workers cannot use ``function``, with file and line; ``field`` names the setting."""
    code = code_of(function)
    setting = f"{field}.name={name}" + (f" ({code.co_filename}:{code.co_firstlineno})" if code else "")
    if inspect.iscoroutinefunction(function):
        yield f"{setting} is an `async def`, which is not supported; write it as a plain `def`"
        return
    try:
        signature = inspect.signature(function)
        _check_order(list(signature.parameters)[:3])
        require_options(f"reward function {name!r}", signature, GIVEN, options)
    except ValueError as error:
        yield f"{setting} does not fit {field}.options={dict(options)}: {error}"


def _check_order(names: list[str]) -> None:
    """Raise ``ValueError`` for names that would receive each other's values, or that other frameworks' callers fill."""
    meant = ["response" if name == "responses" else name for name in names]
    if not _OF_OTHERS.isdisjoint(names) or (sorted(meant) == sorted(GIVEN) and meant != list(GIVEN)):
        raise ValueError(f"it takes ({', '.join(names)}), but is given {', '.join(GIVEN)} by position; take these")


def require_options(
    subject: str, signature: inspect.Signature, given: Sequence[str], options: Mapping[str, Any]
) -> None:
    """Raise ``ValueError`` unless a call with ``given`` by position and the options by name is possible."""
    try:
        signature.bind(*given, **options)
    except TypeError as error:
        takes = ", ".join(map(str, signature.parameters.values())) or "nothing"
        raise ValueError(f"{subject} cannot be called with its options: {error}; it takes {takes}") from error
