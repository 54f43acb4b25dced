"""The live terminal display: progress bar, figures, and where the step's time goes."""

from collections.abc import Sequence
from typing import TextIO

from rich.columns import Columns
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bar
from rich.text import Text

from slime_like.observability.names import folded

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

    def __init__(self, total_steps: int, stream: TextIO, unit: str) -> None:
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
        )
        self._task = self._bar.add_task("steps", total=total_steps)
        self._figures: list[tuple[str, str]] = []
        self._phases: list[tuple[str, float]] = []
        self._live = Live(get_renderable=self._render, console=console, refresh_per_second=2)
        self._live.start()

    def show(self, step: int, figures: list[tuple[str, str]], shares: list[tuple[str, float]]) -> None:
        self._figures, self._phases = figures, shares
        self._bar.update(self._task, completed=step)

    def note(self, text: str) -> None:
        self._live.console.print(escape(text), highlight=False)

    def close(self) -> None:
        self._live.stop()

    def _render(self) -> RenderableType:
        bar = self._bar.get_renderable()
        return Group(bar, _table(self._figures), _shares(self._phases)) if self._figures else bar


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
