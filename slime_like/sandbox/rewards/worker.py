"""One reward worker process, started by the pool as ``python -m slime_like.sandbox.rewards.worker PARENT_PID``."""

import json
import math
import sys
from collections.abc import Callable, Sequence
from typing import Any

from slime_like.errors import ConfigError
from slime_like.interfaces.user_code import GROUP_MARK, RewardResult, as_result
from slime_like.plugins.resolve import code_of, named_place
from slime_like.sandbox.rewards.registry import (
    EASY_ANSWERS,
    LOCAL,
    REGISTERED,
    ROW,
    WARMED,
    require_reward,
    resolve_reward,
    takes_row,
)
from slime_like.sandbox.serving import Handler, ItemFailed, encode, serve, untrusted

_WARM_UP = {"prompt": "", "response": "```python\n1\n```\n\\boxed{1}"}


class _Function:
    """A reward function with its options. Its return values are checked."""

    def __init__(self, field: str, name: str, options: dict[str, Any]) -> None:
        self.name = name
        self._field = field
        self._options = options
        try:
            self._call: Callable[..., Any] = resolve_reward(name)
            require_reward(name, self._call, options)
        except ValueError as error:
            place = named_place(error, name, "__call__")
            raise ConfigError([f"{field}.name={name} ({place}) cannot be used: {error}"]) from error
        self.of_groups = getattr(self._call, GROUP_MARK, False) is True
        self._takes_row = takes_row(self._call, options)
        self._fault = "response" if name in LOCAL else None
        self._code = None if name in REGISTERED else code_of(self._call)

    def results(self, item: dict[str, Any]) -> list[RewardResult]:
        """Return one result for a response, or one for each response of a group.

        An included function that fails on an easy response, too, fails because of the row, or cannot run here.
        """
        try:
            return self._results(item)
        except ItemFailed as failed:
            if "fault" in failed.answer:
                easy = _WARM_UP["response"]
                try:
                    self._results(item | {"response": easy, "responses": [easy] * len(item.get("responses", ()))})
                except ItemFailed:
                    del failed.answer["fault"]
            raise

    def _results(self, item: dict[str, Any]) -> list[RewardResult]:
        responses = item["responses"] if self.of_groups else item["response"]
        with untrusted(self.name, self._code, self._fault):
            row = {ROW: json.loads(item[ROW])} if self._takes_row else {}
            found = self._call(item["prompt"], responses, item["answer"], **self._options, **row)
            if not self.of_groups:
                return [_checked(found)]
            if not isinstance(found, Sequence) or len(found) != len(responses):
                raise TypeError(f"it returned {str(found)[:50]!r}; return a list with one result for each response")
            return [_checked(result) for result in found]

    def warm_up(self) -> None:
        """Call the function once if its first call takes long, or shows whether this machine can run it."""
        if self.name not in WARMED:
            return
        try:
            self._results({**_WARM_UP, "answer": EASY_ANSWERS[self.name]})
        except ItemFailed as failed:
            why = failed.answer.get("detail") or failed.answer["reason"]
            raise ConfigError([f"{self._field}.name={self.name}: cannot be used on this machine: {why}"]) from failed


def _prepare(setup: dict[str, Any]) -> tuple[Handler, dict[str, Any]]:
    functions = [_Function(**function) for function in setup["functions"]]
    for function in functions:
        function.warm_up()

    def handle(item: dict[str, Any]) -> dict[str, Any]:
        called = [(at, each) for at, each in enumerate(functions) if each.of_groups is ("responses" in item)]
        samples = [
            {
                "scores": [(at, float(r.reward), float(r.success)) for (at, _), r in zip(called, results, strict=True)],
                "metadata": {each.name: r.metadata for (_, each), r in zip(called, results, strict=True) if r.metadata},
            }
            for results in zip(*[each.results(item) for _, each in called], strict=True)
        ]
        return {"samples": samples}

    return handle, {"of_groups": [function.name for function in functions if function.of_groups]}


def _checked(found: Any) -> RewardResult:
    result = as_result(found)
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
