"""Answers of a trainer group that are computed when they are asked for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Later(Generic[T]):
    """Answers to one call."""

    compute: Callable[[], T]

    @cached_property
    def _answers(self) -> T:
        return self.compute()

    def result(self, timeout_s: float | None = None) -> T:
        return self._answers


class OneRank:
    """A trainer group of one rank with the methods of ``part``, by default those of a subclass."""

    part: Any = None

    @property
    def ranks(self) -> OneRank:
        return self

    def call(self, phase: str, method: Callable[..., Any], *arguments: Any) -> list[Any]:
        return self.start(phase, method, *arguments).result()

    def start(self, phase: str, method: Callable[..., Any], *arguments: Any) -> Later[list[Any]]:
        assert phase
        return Later(lambda: [getattr(self.part or self, method.__name__)(*arguments)])

    def defer(self, answers: Later[Any]) -> None:
        answers.result()
