"""Answers of a model's ranks that are computed when they are asked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Generic, TypeVar

from slime_like.orchestration.trainer.rank import TrainerRank

T = TypeVar("T")


@dataclass(frozen=True)
class Later(Generic[T]):
    """Answers to one call."""

    compute: Callable[[], T]

    @cached_property
    def _answers(self) -> T:
        return self.compute()

    def result(self, timeout_s: float | None = None, on_waiting: object = None) -> T:
        return self._answers

    @property
    def references(self) -> dict[str, Later[T]]:
        """Arguments of calls that start once these answers are there."""
        return {"": self}


class OneRank:
    """A model on one rank, with the methods of ``part``, by default those of a subclass."""

    part: Any = None

    name = "trainer"

    def on_devices(self) -> AbstractContextManager[None]:
        return nullcontext()

    def call(self, phase: str, method: Callable[..., Any], *arguments: Any) -> list[Any]:
        return self.start(phase, method, *arguments).result()

    def start(self, phase: str, method: Callable[..., Any], *arguments: Any) -> Later[list[Any]]:
        assert phase
        return Later(lambda: [getattr(self.part or self, method.__name__)(*arguments)])

    def stored_scores(self, rows: Sequence[Any], *fields: str) -> Any:
        return self.call("reporting scores", TrainerRank.stored_scores, [row.sequence_id for row in rows], *fields)[0]

    def defer(self, answers: Later[Any]) -> None:
        answers.result()
