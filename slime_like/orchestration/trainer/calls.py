"""Typed calls to all trainer ranks: in order, with a time bound, and with one-sentence failures."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Concatenate, ParamSpec, TypeVar

import ray

from slime_like.errors import TrainerError
from slime_like.interfaces import RankCoordinates
from slime_like.orchestration.cluster.ray_calls import Answers

P = ParamSpec("P")
T = TypeVar("T")


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

    def by_replica(self, answers: Sequence[T | None]) -> list[T]:
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
        answers = dict(zip(self.names, references, strict=True))
        return Answers(answers, phase, self.timeout_s, TrainerError, before=self.settle)

    def scatter(self, phase: str, method: Callable[..., T], replicas: Sequence[Any], *more: Any) -> Answers[T]:
        """Call each rank with its replica's element of ``replicas``, then ``more``, without waiting.

        Ranks of a replica share one stored copy of the element.
        """
        stored = [ray.put(value) for value in replicas]
        return self.start_each(phase, method, [(stored[replica], *more) for replica in self._replicas])

    def defer(self, answers: Answers[None]) -> None:
        """Don't wait for ``answers``. The next call that waits, or ``is_idle``, raises a failure."""
        self._deferred.append(answers)

    def is_idle(self) -> bool:
        """Return whether all deferred calls are answered. Raises a failure among them once. Never waits."""
        deferred, self._deferred = self._deferred, []
        self._deferred = [answers for answers in deferred if not answers.is_answered()]
        return not self._deferred

    def settle(self, timeout_s: float | None = None) -> None:
        """Wait for every deferred call. Each bound starts when the previous call has ended."""
        deferred, self._deferred = self._deferred, []
        for answers in deferred:
            answers.result(timeout_s)


def given(answers: Iterable[T | None]) -> list[T]:
    """Return the answers of the ranks that have one."""
    return [answer for answer in answers if answer is not None]
