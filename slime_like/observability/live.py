"""The live terminal display: progress bar, what is waited for, figures, and where the step's time goes."""

import math
from collections.abc import Callable, Sequence
from typing import TextIO

from rich.columns import Columns
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bar
from rich.text import Text

from slime_like.observability.names import folded
from slime_like.observability.waiting import Waiting

_COLOURS = {
    "wait": "bright_black",
    "generate": "cyan",
    "reward": "yellow",
    "score": "blue",
    "train": "green",
    "sync": "magenta",
    "orchestration": "red",
    "other": "white",
}
_SHARE_WIDTH = 60


class LiveDisplay:
    """Drawn in place on ``stream``; what is printed meanwhile goes above it. A thread redraws it twice a second."""

    def __init__(self, total_steps: int, stream: TextIO, now: Callable[[], float], unit: str) -> None:
        console = Console(file=stream, force_terminal=True)
        self._bar = Bar(
            TextColumn(f"[bold]{escape(unit)}"),
            MofNCompleteColumn(),
            BarColumn(),
            TextColumn("elapsed"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=console,
            auto_refresh=False,
            get_time=now,
            speed_estimate_period=math.inf,  # a step may take longer than any period
        )
        self._task = self._bar.add_task("steps", total=total_steps, visible=total_steps > 0)
        self._now = now
        self._waiting: tuple[Waiting, float] | None = None
        self._figures: list[tuple[str, str]] = []
        self._phases: list[tuple[str, float]] = []
        self._live = Live(get_renderable=self._render, console=console, refresh_per_second=2)
        self._live.start()

    def show(self, step: int, figures: list[tuple[str, str]], shares: list[tuple[str, float]]) -> None:
        self._figures, self._phases = figures, shares
        self._bar.update(self._task, completed=step)

    def note(self, text: str) -> None:
        self._live.console.print(escape(text), highlight=False)

    def begin(self, waiting: Waiting) -> None:
        self._waiting = (waiting, self._now())

    def end(self, completed: bool) -> None:
        self._waiting = None

    def close(self) -> None:
        self._live.stop()

    def _render(self) -> RenderableType:
        """The line about a wait is there without one, too: what is below stays in its place."""
        waiting = self._waiting
        text = waiting[0].under_way(self._now() - waiting[1]) if waiting is not None else ""
        head = (self._bar.get_renderable(), Text(text, style="dim", no_wrap=True, overflow="ellipsis"))
        return Group(*head, _table(self._figures), _shares(self._phases)) if self._figures else Group(*head)


def _table(figures: Sequence[tuple[str, str]]) -> Columns:
    """As many beside each other as the terminal is wide."""
    return Columns(
        (Text.assemble((label, "dim"), "\n", (value, "bold")) for label, value in figures), padding=(0, 3, 0, 0)
    )


def _shares(shares: Sequence[tuple[str, float]]) -> Group:
    """One bar cut in proportion to the phases, with its legend."""
    bar, legend = Text(), Text()
    drawn, total = 0, 0.0
    for phase, share in folded(shares):
        total += share
        width = round(_SHARE_WIDTH * total / 100) - drawn
        drawn += width
        bar.append("█" * width, style=_COLOURS[phase])
        legend.append("■ ", style=_COLOURS[phase]).append(f"{phase} {share:.0f}%  ")
    return Group(bar, legend)
