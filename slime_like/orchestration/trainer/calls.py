"""Typed calls to all trainer ranks: in order, with a time bound, and with one-sentence failures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, TypeVar

import ray

from slime_like.errors import TrainerError
from slime_like.interfaces import RankCoordinates
from slime_like.observability.waiting import ignore_answers
from slime_like.orchestration.cluster.ray_calls import gather, one

P = ParamSpec("P")
S = TypeVar("S")
T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
R = TypeVar("R")


class Pending(Protocol[T_co]):
    """Outcome of a call that returned before its work was done."""

    def result(self, timeout_s: float | None = None) -> T_co:
        """Wait for the value, by default for the call's own bound. Raise what the work raised."""


@dataclass(frozen=True, slots=True)
class Mapped(Generic[S, T]):
    """A pending value that is converted when read."""

    pending: Pending[S]
    convert: Callable[[S], T]

    def result(self, timeout_s: float | None = None) -> T:
        return self.convert(self.pending.result(timeout_s))


class Answers(Generic[T]):
    """Answers of all ranks to one call, in rank order: a ``Pending[list[T]]``."""

    def __init__(self, calls: RankCalls, phase: str, references: Sequence[Any]) -> None:
        self._calls = calls
        self._names = calls.names
        self._phase = phase
        self._references = references

    def result(self, timeout_s: float | None = None, left: Callable[[Sequence[str]], None] = ignore_answers) -> list[T]:
        """Wait for all ranks, by default at most ``trainer.step_timeout_s``.

        Args:
            left: see ``slime_like.orchestration.cluster.ray_calls.gather``.

        Raises:
            TrainerError: this call or a deferred call has failed or is late.
        """
        self._calls.settle(timeout_s)
        return self.gather(timeout_s, left)

    def gather(self, timeout_s: float | None = None, left: Callable[[Sequence[str]], None] = ignore_answers) -> list[T]:
        """Wait for the results without checking deferred calls."""
        bound = timeout_s or self._calls.timeout_s
        return gather(self._references, self._names, phase=self._phase, timeout_s=bound, error=TrainerError, left=left)

    def is_answered(self) -> bool:
        """Return whether all ranks have answered. Raises the error of a failed rank. Never waits."""
        ended, running = ray.wait(self._references, num_returns=len(self._references), timeout=0)
        for reference in ended:
            name = self._names[self._references.index(reference)]
            one(reference, name, phase=self._phase, error=TrainerError)
        return not running


class RankCalls:
    """Calls to methods of all ranks or their parts. A rank runs its calls in the order in which they are made.

    A method is given as ``Class.method``, so arguments and answers are typed; see ``TrainerRank.call``. Every call
    names its phase ("scoring") for messages.
    """

    def __init__(self, owner: str, timeout_s: float) -> None:
        self._owner = owner
        self._actors: list[Any] = []
        self._replicas: list[int] = []
        self._deferred: list[Answers[Any]] = []
        self.names: list[str] = []
        self.timeout_s = timeout_s

    def connect(self, actors: Sequence[Any]) -> None:
        """Direct calls to these Ray actors of ``TrainerRank``, in rank order. An empty list ends the calls."""
        self._actors = list(actors)
        self.names = [f"{self._owner} rank {rank}" for rank in range(len(actors))]

    # ---------------------------------------------------------------------------------------------------- replicas
    def place(self, coordinates: Sequence[RankCoordinates]) -> None:
        """Store the ranks' coordinates on the parallel axes."""
        self._replicas = [place.data for place in coordinates]

    @property
    def num_replicas(self) -> int:
        """Number of data-parallel replicas."""
        return max(self._replicas) + 1

    def per_replica(self, values: Sequence[Any], *more: Any) -> list[tuple[Any, ...]]:
        """Build every rank's arguments: its replica's of ``values``, then ``more``. Stores each value only once."""
        stored = [ray.put(value) for value in values]
        return [(stored[replica], *more) for replica in self._replicas]

    def by_replica(self, answers: Sequence[R | None]) -> list[R]:
        """Return one answer per data-parallel replica, from the rank that has one."""
        found = {replica: answer for replica, answer in zip(self._replicas, answers, strict=True) if answer is not None}
        return [found[replica] for replica in sorted(found)]

    # ------------------------------------------------------------------------------------------------------- calls
    def call(
        self, phase: str, method: Callable[Concatenate[Any, P], T], /, *arguments: P.args, **options: P.kwargs
    ) -> list[T]:
        """Call every rank with the same arguments, and wait for all answers."""
        return self.start(phase, method, *arguments, **options).result()

    def start(
        self, phase: str, method: Callable[Concatenate[Any, P], T], /, *arguments: P.args, **options: P.kwargs
    ) -> Answers[T]:
        """Start a call without waiting."""
        return self.start_each(phase, method, [arguments] * len(self._actors), **options)

    def start_each(
        self, phase: str, method: Callable[..., T], arguments: Sequence[tuple[Any, ...]], **options: Any
    ) -> Answers[T]:
        """Call each rank with separate arguments, without waiting."""
        title = f"TrainerRank.{method.__name__}"  # shown in process lists
        references = [
            actor.call.options(name=title).remote(method.__qualname__, *values, **options)
            for actor, values in zip(self._actors, arguments, strict=True)
        ]
        return Answers(self, phase, references)

    def defer(self, answers: Answers[None]) -> None:
        """Don't wait for ``answers``. The next call that waits, or ``raise_failures``, raises a failure."""
        self._deferred.append(answers)

    def raise_failures(self) -> None:
        """Raise once the error of a deferred call that has already failed. Never waits."""
        deferred, self._deferred = self._deferred, []
        self._deferred = [answers for answers in deferred if not answers.is_answered()]

    @property
    def has_deferred(self) -> bool:
        """True if a deferred call was unanswered when failures were last raised."""
        return bool(self._deferred)

    def settle(self, timeout_s: float | None = None) -> None:
        """Wait for every deferred call. Each bound starts when the previous call has ended."""
        deferred, self._deferred = self._deferred, []
        for answers in deferred:
            answers.gather(timeout_s)
