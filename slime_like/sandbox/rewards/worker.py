"""One reward worker process, started by the pool as ``python -m slime_like.sandbox.rewards.worker PARENT_PID``."""

import math
import sys
from collections.abc import Callable, Sequence
from typing import Any

from slime_like.errors import ConfigError
from slime_like.interfaces.reward import RewardResult
from slime_like.plugins.traceback import code_of, named_place
from slime_like.sandbox.protocol import encode
from slime_like.sandbox.rewards.registry import LOCAL, REGISTERED, resolve_reward
from slime_like.sandbox.rewards.signature import is_group_reward, signature_problems
from slime_like.sandbox.serving import Handler, failure, serve

_WARM_UP = {"prompt": "", "response": "\\boxed{1}", "answer": "1"}


class _Function:
    """A reward function with its options, and what it returned checked."""

    def __init__(self, field: str, name: str, options: dict[str, Any]) -> None:
        self.name = name
        self._options = options
        try:
            self._call: Callable[..., Any] = resolve_reward(name)
        except ValueError as error:
            place = named_place(error, name, "__call__")
            raise ConfigError([f"{field}.name={name} ({place}) cannot be used: {error}"]) from error
        self.of_groups = is_group_reward(self._call)
        self._code = None if name in REGISTERED else code_of(self._call)
        if problems := list(signature_problems(field, name, self._call, options)):
            raise ConfigError(problems)

    def of_sample(self, item: dict[str, Any]) -> RewardResult:
        return _checked(self._call(item["prompt"], item["response"], item["answer"], **self._options))

    def of_group(self, item: dict[str, Any]) -> list[RewardResult]:
        responses = item["responses"]
        results = self._call(item["prompt"], responses, item["answer"], **self._options)
        if not isinstance(results, Sequence) or len(results) != len(responses):
            raise TypeError(f"it returned {str(results)[:50]!r}; return one RewardResult for each response")
        return [_checked(result) for result in results]

    def failure(self, error: BaseException) -> dict[str, Any]:
        """The answer for an item without a reward: the reason; for a custom function, with file and line."""
        return failure(error, self.name, self._code)

    def warm_up(self) -> None:
        """Compile what a first call compiles, outside any sample's time; not users' functions, nor a service."""
        if self.name in LOCAL and not self.of_groups:
            self.of_sample(_WARM_UP)


def _prepare(setup: dict[str, Any]) -> tuple[Handler, dict[str, Any]]:
    functions = [_Function(**function) for function in setup["functions"]]
    for function in functions:
        function.warm_up()
    samples = [function for function in functions if not function.of_groups]
    groups = [function for function in functions if function.of_groups]

    def handle(item: dict[str, Any]) -> dict[str, Any]:
        return _group_outcome(groups, item) if "responses" in item else _outcome(samples, item)

    return handle, {"of_groups": [function.name for function in groups]}


def _outcome(functions: Sequence[_Function], item: dict[str, Any]) -> dict[str, Any]:
    """Rewards of all functions, or the reason why this one sample has none."""
    results: list[RewardResult] = []
    for function in functions:
        try:
            results.append(function.of_sample(item))
        except (Exception, SystemExit) as error:
            return function.failure(error)
    return _as_message(functions, results)


def _group_outcome(functions: Sequence[_Function], item: dict[str, Any]) -> dict[str, Any]:
    """One outcome per sample, or the reason why this group has none."""
    results: list[list[RewardResult]] = []
    for function in functions:
        try:
            results.append(function.of_group(item))
        except (Exception, SystemExit) as error:
            return function.failure(error)
    return {"samples": [_as_message(functions, sample) for sample in zip(*results, strict=True)]}


def _as_message(functions: Sequence[_Function], results: Sequence[RewardResult]) -> dict[str, Any]:
    return {
        "rewards": [float(result.reward) for result in results],
        "successes": [float(result.success) for result in results],
        "metadata": {f.name: r.metadata for f, r in zip(functions, results, strict=True) if r.metadata},
    }


def _checked(result: Any) -> RewardResult:
    if not isinstance(result, RewardResult):
        raise TypeError(f"it returned a {type(result).__name__}; return a RewardResult")
    if not math.isfinite(result.reward):
        raise ValueError(f"its reward is {result.reward}; return a finite number")
    try:
        encode(result.metadata)
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"its metadata cannot be written as JSON ({error}); return numbers, text, lists, dicts"
        ) from error
    return result


if __name__ == "__main__":
    sys.exit(serve(_prepare))
