"""The live terminal display: progress bar, figures, and where the step's time goes."""

from collections.abc import Mapping
from typing import TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bar
from rich.table import Table
from rich.text import Text

from slime_like.observability.names import phase_shares, shown_figures

_COLOURS = {
    "wait": "bright_black",
    "generate": "cyan",
    "reward": "yellow",
    "score": "blue",
    "train": "green",
    "sync": "magenta",
    "orchestration": "red",
}
_SHARE_WIDTH = 60


class LiveDisplay:
    """Drawn in place on ``stream``; what is printed meanwhile goes above it. A thread redraws it twice a second."""

    def __init__(self, total_steps: int, stream: TextIO, unit: str) -> None:
        console = Console(file=stream, force_terminal=True)
        self._bar = Bar(
            TextColumn(f"[bold]{escape(unit)}"),
            MofNCompleteColumn(),
            BarColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=console,
            auto_refresh=False,
        )
        self._task = self._bar.add_task("steps", total=total_steps)
        self._values: dict[str, float] = {}
        self._live = Live(get_renderable=self._render, console=console, refresh_per_second=2)
        self._live.start()

    def show(self, step: int, values: Mapping[str, float]) -> None:
        self._values = dict(values)
        self._bar.update(self._task, completed=step)

    def note(self, text: str) -> None:
        self._live.console.print(escape(text), highlight=False)

    def close(self) -> None:
        self._live.stop()

    def _render(self) -> RenderableType:
        bar = self._bar.get_renderable()
        return Group(bar, _figures(self._values), _shares(self._values)) if self._values else bar


def _figures(values: Mapping[str, float]) -> Table:
    table = Table.grid(padding=(0, 3))
    figures = shown_figures(values)
    table.add_row(*(Text(label, style="dim") for label, _ in figures))
    table.add_row(*(Text(value, style="bold") for _, value in figures))
    return table


def _shares(values: Mapping[str, float]) -> Group:
    """One bar cut in proportion to the phases, with its legend."""
    bar, legend = Text(), Text()
    drawn, total = 0, 0.0
    for phase, share in phase_shares(values):
        total += share
        width = round(_SHARE_WIDTH * total / 100) - drawn
        drawn += width
        bar.append("█" * width, style=_COLOURS[phase])
        legend.append("■ ", style=_COLOURS[phase]).append(f"{phase} {share:.0f}%  ")
    return Group(bar, legend)
