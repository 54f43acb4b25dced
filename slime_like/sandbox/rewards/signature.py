"""Check that reward workers can call a function: its parameters and their order, its options, what it returns."""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import NoneType
from typing import Any, get_args, get_origin

from slime_like.interfaces.reward import GROUP_MARK
from slime_like.plugins.traceback import code_of

GIVEN = ["prompt", "response", "answer"]
_OF_OTHERS = frozenset(
    ("prompts", "completions", "completion_ids", "data_source", "solution_str", "ground_truth", "queries", "labels")
)
"""First parameters of reward functions for TRL, verl and OpenRLHF, which are given something else there."""
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_NO_RESULTS = (NoneType, complex, str, bytes, set)
_NO_RESULT_NAMES = frozenset(kind.__name__ for kind in _NO_RESULTS) | {"None"}


def is_group_reward(function: Callable[..., Any]) -> bool:
    """True where it is given all responses of a group at once."""
    return getattr(function, GROUP_MARK, False) is True


def signature_problems(
    field: str, name: str, function: Callable[..., Any], options: Mapping[str, Any]
) -> Iterator[str]:
    """Why workers cannot use ``function``, with file and line where it is Python's; ``field`` names the setting."""
    code = code_of(function)
    place = "" if code is None else f" ({code.co_filename}:{code.co_firstlineno})"
    setting = f"{field}.name={name}{place}"
    if inspect.iscoroutinefunction(function):
        yield f"{setting} is an `async def`, which is not supported; write it as a plain `def`"
        return
    of_groups = is_group_reward(function)
    try:
        signature = _signature(function)
        _check_parameters(name, signature, of_groups)
    except ValueError as error:
        yield f"{setting} does not fit: {error}"
        return
    try:
        require_options(f"reward function {name!r}", signature, GIVEN, options)
    except ValueError as error:
        yield f"{field}.options={dict(options)} do not fit: {error}{place}"
    if not _may_be_result(signature.return_annotation, of_groups):
        wanted = "a list with one result for each response" if of_groups else "a number, a pair or a RewardResult"
        returns = inspect.formatannotation(signature.return_annotation)
        yield f"{setting} is annotated to return {returns}; return {wanted}"


def require_options(
    subject: str, signature: inspect.Signature, given: Sequence[str], options: Mapping[str, Any]
) -> None:
    """Raise ``ValueError`` unless the options fit behind what is given by position, and none is missing."""
    try:
        signature.bind(*given, **options)
    except TypeError as error:
        takes = ", ".join(map(str, list(signature.parameters.values())[len(given) :]))
        problem = str(error).replace("keyword-only ", "")  # from Python 3.12 on; every option is given by its name
        raise ValueError(f"options of {subject}: {problem}; it takes {takes or 'none'}") from error


def _signature(function: Callable[..., Any]) -> inspect.Signature:
    """Evaluate annotations where possible. Raises ``ValueError`` for some that are not written in Python."""
    try:
        return inspect.signature(function, eval_str=True)
    except Exception:  # an annotation is code, which raises what it likes
        return inspect.signature(function)


def _check_parameters(name: str, signature: inspect.Signature, of_groups: bool) -> None:
    """Raise ``ValueError`` unless prompt, response (or all responses) and answer can be given by position, and in
    this order: names of another order would be given each other's values."""
    given = "prompt, responses and answer" if of_groups else "prompt, response and answer"
    names = [p.name for p in signature.parameters.values() if p.kind in _POSITIONAL][:3]
    meant = ["response" if name == "responses" else name for name in names]
    if sorted(meant) == sorted(GIVEN) and meant != GIVEN:
        raise ValueError(
            f"reward function {name!r} takes ({', '.join(names)}), but is given {given} by position; put its "
            "parameters in this order"
        )
    if not _OF_OTHERS.isdisjoint(names):
        raise ValueError(
            f"reward function {name!r} takes ({', '.join(names)}), as another framework calls it, but is given "
            f"{given}; wrap it in a function with these parameters"
        )
    try:
        signature.bind_partial("", "", "")
    except TypeError as error:
        takes = signature.replace(return_annotation=inspect.Signature.empty)
        raise ValueError(
            f"reward function {name!r} takes {takes}, but is called with {given} before its options; give it these "
            "three parameters first"
        ) from error


def _may_be_result(annotation: Any, of_groups: bool) -> bool:
    """False where an annotation is certainly no result (``as_result``), or no list of them."""
    if isinstance(annotation, str):  # it could not be evaluated
        return annotation not in _NO_RESULT_NAMES
    kind = NoneType if annotation is None else get_origin(annotation) or annotation
    if not isinstance(kind, type) or kind is inspect.Signature.empty:
        return True
    if kind is tuple and not of_groups:
        return True
    if issubclass(kind, Sequence) and kind not in _NO_RESULTS:
        return of_groups and all(_may_be_result(item, of_groups=False) for item in get_args(annotation))
    return not issubclass(kind, _NO_RESULTS)
