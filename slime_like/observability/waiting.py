"""Waits of a run, e.g. for engines that load or groups that are sampled."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from slime_like.system.words import pluralize


def ignore_answers(waiting: Sequence[str] | int) -> None:
    """Do nothing. The default for callers that show no progress."""


@dataclass(slots=True)
class Waiting:
    """One wait and its description. One thread changes it, another may read it.

    Attributes:
        title: the awaited work ("loading engines").
        total: number of awaited items; 0 counts nothing.
        noun: name of an item, in the singular: "3 of 16 groups". Without it: "1 of 2 ready".
        count: returns the finished items; without it, ``on_waiting`` or ``reach`` records them.
    """

    title: str
    total: int = 0
    noun: str = ""
    count: Callable[[], int] | None = None
    done: int = 0
    names: Sequence[str] = ()

    def on_waiting(self, names: Sequence[str]) -> None:
        self.names = tuple(names)
        self.done = self.total - len(self.names)

    def reach(self, done: int) -> None:
        self.done = done

    def under_way(self, seconds: float) -> str:
        done = self.done if self.count is None else self.count()
        number = f"{done} of {self._all()}, " if self.total else ""
        others = f" and {len(self.names) - 1} more" if len(self.names) > 1 else ""
        names = f", waiting for {self.names[0]}{others}" if self.names else ""
        return f"{self.title}: {number}{seconds:.0f} s{names}"

    def finished(self, seconds: float) -> str:
        number = f"{self._all()} in " if self.total else ""
        return f"{self.title}: {number}{seconds:.1f} s"

    def _all(self) -> str:
        return pluralize(self.total, self.noun) if self.noun else f"{self.total} ready"
