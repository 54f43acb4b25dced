"""Typed calls of all trainer ranks: in order, bounded in time, failing with one sentence."""

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


class Answers(Generic[T]):
    """The answers of all ranks to one call: a ``Pending[list[T]]``, in the order of the ranks."""

    def __init__(self, calls: RankCalls, phase: str, references: Sequence[Any]) -> None:
        self._calls = calls
        self._names = calls.names
        self._phase = phase
        self._references = references

    def result(self, timeout_s: float | None = None, left: Callable[[Sequence[str]], None] = ignore_answers) -> list[T]:
        """Wait for all ranks, at most ``trainer.step_timeout_s`` unless another bound is given.

        Args:
            left: see ``slime_like.orchestration.cluster.ray_calls.gather``.

        Raises:
            TrainerError: this call or one that was deferred has failed, or is late.
        """
        self._calls.settle(timeout_s)
        return self.gather(timeout_s, left)

    def gather(self, timeout_s: float | None = None, left: Callable[[Sequence[str]], None] = ignore_answers) -> list[T]:
        """Wait for the results without checking deferred calls."""
        bound = timeout_s or self._calls.timeout_s
        return gather(self._references, self._names, phase=self._phase, timeout_s=bound, error=TrainerError, left=left)

    def is_answered(self) -> bool:
        """Return whether all ranks have answered. Raises the error of a rank that has failed; never waits."""
        ended, running = ray.wait(self._references, num_returns=len(self._references), timeout=0)
        for reference in ended:
            name = self._names[self._references.index(reference)]
            one(reference, name, phase=self._phase, error=TrainerError)
        return not running


class RankCalls:
    """Calls methods of every rank, or of its parts; a rank works on its calls in the order in which they are made.

    A method is given as ``Class.method``, so that arguments and answers are typed: see ``TrainerRank.call``. Every call
    names its phase ("scoring"), for messages.
    """

    def __init__(self, owner: str, timeout_s: float) -> None:
        self._owner = owner
        self._actors: list[Any] = []
        self._replicas: list[int] = []
        self._deferred: list[Answers[Any]] = []
        self.names: list[str] = []
        self.timeout_s = timeout_s

    def connect(self, actors: Sequence[Any]) -> None:
        """Call these Ray actors of ``TrainerRank`` from now on, in the order of their ranks; none ends the calls."""
        self._actors = list(actors)
        self.names = [f"{self._owner} rank {rank}" for rank in range(len(actors))]

    # ---------------------------------------------------------------------------------------------------- replicas
    def place(self, coordinates: Sequence[RankCoordinates]) -> None:
        """Find the ranks' coordinates on the parallel axes."""
        self._replicas = [place.data for place in coordinates]

    @property
    def num_replicas(self) -> int:
        """Data-parallel replicas."""
        return max(self._replicas) + 1

    def per_replica(self, values: Sequence[Any], *more: Any) -> list[tuple[Any, ...]]:
        """Arguments for every rank: its replica's of ``values``, then ``more``. A value is stored once per replica."""
        stored = [ray.put(value) for value in values]
        return [(stored[replica], *more) for replica in self._replicas]

    def by_replica(self, answers: Sequence[R | None]) -> list[R]:
        """Return one answer per data-parallel replica, from its rank that has one."""
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
        title = f"TrainerRank.{method.__name__}"  # what process lists show
        references = [
            actor.call.options(name=title).remote(method.__qualname__, *values, **options)
            for actor, values in zip(self._actors, arguments, strict=True)
        ]
        return Answers(self, phase, references)

    def defer(self, answers: Answers[None]) -> None:
        """Do not wait for ``answers``: a failure is raised by the next call that waits, or by ``raise_failures``."""
        self._deferred.append(answers)

    def raise_failures(self) -> None:
        """Raise, once, the error of a deferred call that has failed already; never waits."""
        deferred, self._deferred = self._deferred, []
        self._deferred = [answers for answers in deferred if not answers.is_answered()]

    @property
    def has_deferred(self) -> bool:
        """A deferred call had not been answered when failures were last raised."""
        return bool(self._deferred)

    def settle(self, timeout_s: float | None = None) -> None:
        """Wait for every deferred call, each with a separate bound: it starts when the one before has ended."""
        deferred, self._deferred = self._deferred, []
        for answers in deferred:
            answers.gather(timeout_s)
