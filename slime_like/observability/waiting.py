"""What a run waits for between its steps: engines that load, prompts that are evaluated, groups that are sampled."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from slime_like.system.words import counted


def ignore_answers(left: Sequence[str] | int) -> None:
    """Show nothing of who has answered."""


@dataclass(slots=True)
class Waiting:
    """One wait, in words. One thread changes it, another may read it.

    Attributes:
        title: what is being done ("loading engines").
        total: how many are awaited; 0 counts nothing.
        noun: what is counted, in the singular: "3 of 16 groups"; without it, "1 of 2 ready".
        count: returns how many are there; without it, ``left`` or ``reach`` records that.
    """

    title: str
    total: int = 0
    noun: str = ""
    count: Callable[[], int] | None = None
    done: int = 0
    names: Sequence[str] = ()

    def left(self, names: Sequence[str]) -> None:
        """Record who has not answered yet."""
        self.names = tuple(names)
        self.done = self.total - len(self.names)

    def reach(self, done: int) -> None:
        """Record how many are there."""
        self.done = done

    def under_way(self, seconds: float) -> str:
        """One line while it lasts."""
        done = self.done if self.count is None else self.count()
        number = f"{done} of {self._all()}, " if self.total else ""
        others = f" and {len(self.names) - 1} more" if len(self.names) > 1 else ""
        names = f", waiting for {self.names[0]}{others}" if self.names else ""
        return f"{self.title}: {number}{seconds:.0f} s{names}"

    def finished(self, seconds: float) -> str:
        """One line when it is over."""
        number = f"{self._all()} in " if self.total else ""
        return f"{self.title}: {number}{seconds:.1f} s"

    def _all(self) -> str:
        return counted(self.total, self.noun) if self.noun else f"{self.total} ready"
