"""Summary of a run as tables on a terminal."""

from collections.abc import Iterable, Iterator, Sequence
from statistics import fmean
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from slime_like.observability.report.data import RunData, shortened, spelled_out, summary
from slime_like.observability.report.panels import key_metrics, panels, phase_picture
from slime_like.observability.tables import HELD_OUT_TABLE, SAMPLE_TABLE, reading_order

_NEWEST_SAMPLES = 4
_MAX_TEXT = 240


def show(run: RunData, console: Console) -> None:
    """Print a run's summary, metrics, phases, newest samples and held-out responses."""
    console.print(_labelled(f"Run {run.run_dir.name}", [summary(run)]))
    if run.trained_steps:
        columns = "metric", "first", "last", "lowest", "highest"
        metrics = [(name, each[0], each[-1], min(each), max(each)) for name, each in key_metrics(run, panels(run))]
        console.print(_ruled("Metrics by training step", columns, metrics))
    if picture := phase_picture(run):
        phases = [(phase, f"{share:.1f}%", fmean(seconds), max(seconds)) for phase, seconds, share in picture.parts]
        console.print(_ruled("Where the time went", ("phase", "share", "mean seconds a step", "longest"), phases))
    for name, title in ((SAMPLE_TABLE, "Newest samples"), (HELD_OUT_TABLE, "Newest held-out responses")):
        if (table := run.tables.get(name)) is not None and table.rows:
            console.print(_labelled(title, map(_cells, table.rows[-_NEWEST_SAMPLES:])))


def _cells(row: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for column in ("step", *reading_order(list(row))):
        value = row.get(column)
        if value not in (None, ""):
            first, *more = value.split("\n") if column == "Conversation" else [value]
            yield column, first
            yield from (("", line) for line in more)


def _printable(value: Any) -> Text:
    """Return ``value`` as text without markup or unprintable characters. Long text is shortened."""
    text = "-" if value is None else str(value)
    if isinstance(value, float):
        text = f"{value:,.0f}" if 1e4 <= abs(value) < 1e9 else f"{value:.4g}"
    return Text(spelled_out(shortened(text, _MAX_TEXT), one_line=True))


def _labelled(title: str, groups: Iterable[Iterable[tuple[str, Any]]]) -> Table:
    table = Table(title=Text(title), show_header=False, title_justify="left")
    for group in groups:
        for label, value in group:
            table.add_row(_printable(label), _printable(value))
        table.add_section()
    return table


def _ruled(title: str, columns: Sequence[str], rows: Sequence[tuple[Any, ...]]) -> Table:
    table = Table(title=Text(title), title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for column in columns:
        table.add_column(_printable(column), overflow="fold")
    for row in rows:
        table.add_row(*map(_printable, row))
    return table
