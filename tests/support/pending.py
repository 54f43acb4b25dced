"""Pending values of tests, and a trainer group of one rank that answers at once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Later(Generic[T]):
    """A ``Pending`` that is computed when it is asked for."""

    compute: Callable[[], T]

    def result(self, timeout_s: float | None = None) -> T:
        return self.compute()


class OneBackend:
    """A ``TrainerGroup`` whose only rank has the methods of a subclass as its backend."""

    @property
    def ranks(self) -> OneBackend:
        return self

    def call(self, phase: str, method: Callable[..., Any], *arguments: Any) -> list[Any]:
        return self.start(phase, method, *arguments).result()

    def start(self, phase: str, method: Callable[..., Any], *arguments: Any) -> Later[list[Any]]:
        assert phase
        return Later(lambda: [getattr(self, method.__name__)(*arguments)])
