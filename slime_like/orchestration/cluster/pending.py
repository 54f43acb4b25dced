"""A value that is still being computed elsewhere."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

S = TypeVar("S")
T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Pending(Protocol[T_co]):
    """The outcome of a call that has returned before its work was done."""

    def result(self, timeout_s: float | None = None) -> T_co:
        """Wait for the value, by default as long as the call's own bound; raise what the work raised."""


@dataclass(frozen=True, slots=True)
class Mapped(Generic[S, T]):
    """A pending value, converted when it is asked for."""

    pending: Pending[S]
    convert: Callable[[S], T]

    def result(self, timeout_s: float | None = None) -> T:
        return self.convert(self.pending.result(timeout_s))
