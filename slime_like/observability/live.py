"""Live terminal display: progress bar, current wait, metrics, and the step's time by phase."""

import math
from collections.abc import Callable
from typing import TextIO

from rich.columns import Columns
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bar
from rich.text import Text

from slime_like.observability.names import phases_text
from slime_like.observability.timing import Waiting


class LiveDisplay:
    """Display drawn in place on ``stream``, below other output. A thread redraws it twice a second."""

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
        # Without a wait, its line stays empty, so the lines below don't move.
        waiting = self._waiting
        text = waiting[0].under_way(self._now() - waiting[1]) if waiting is not None else ""
        head = (self._bar.get_renderable(), Text(text, style="dim", no_wrap=True, overflow="ellipsis"))
        if not self._figures:
            return Group(*head)
        figures = (Text.assemble((label, "dim"), "\n", (value, "bold")) for label, value in self._figures)
        return Group(*head, Columns(figures, padding=(0, 3, 0, 0)), Text(phases_text(self._phases)))
