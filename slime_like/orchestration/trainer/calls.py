"""Calls to the trainer ranks of one model, which are ordered by rank and belong to data-parallel replicas."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import ray

from slime_like.errors import TrainerError
from slime_like.interfaces import RankCoordinates
from slime_like.orchestration.cluster.ray_calls import ActorGroup, Answers

T = TypeVar("T")


class RankCalls(ActorGroup):
    """The ``TrainerRank`` actors of one model."""

    def __init__(self, owner: str, timeout_s: float) -> None:
        super().__init__(timeout_s, TrainerError)
        self._owner = owner
        self._replicas: list[int] = []

    def connect(self, actors: Sequence[Any]) -> None:
        """Direct calls to these Ray actors of ``TrainerRank``, in rank order. An empty list ends the calls."""
        self.actors = list(actors)
        self.names = [f"{self._owner} rank {rank}" for rank in range(len(actors))]

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

    def scatter(self, phase: str, method: Callable[..., T], replicas: Sequence[Any], *more: Any) -> Answers[T]:
        """Call each rank with its replica's element of ``replicas``, then ``more``, without waiting.

        Ranks of a replica share one stored copy of the element.
        """
        stored = [ray.put(value) for value in replicas]
        arguments = {rank: (stored[replica], *more) for rank, replica in enumerate(self._replicas)}
        return self.start_each(phase, method, arguments)


def given(answers: Iterable[T | None]) -> list[T]:
    """Return the answers of the ranks that have one."""
    return [answer for answer in answers if answer is not None]
