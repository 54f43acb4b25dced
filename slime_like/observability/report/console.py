"""A run's essentials as tables on a terminal."""

from statistics import fmean
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from slime_like.observability.report.data import RunData, StoredTable, spelled_out, summary
from slime_like.observability.report.panels import PhasePicture, key_metrics, phase_picture
from slime_like.observability.tables import SAMPLE_TABLE

_NEWEST_SAMPLES = 4
_MAX_TEXT = 160
_BORDERS = 3
"""Characters that a column takes beside its text: a line, and a space on either side."""


def show(run: RunData, console: Console) -> None:
    """Print the whole report."""
    table = Table(title=Text(f"Run {run.run_dir.name}"), show_header=False, title_justify="left")
    for entry in summary(run):
        table.add_row(*map(_printable, entry))
    console.print(table)
    console.print(_figures(run, console.width))
    if picture := phase_picture(run):
        console.print(_phases(picture))
    samples = run.tables.get(SAMPLE_TABLE)
    if samples is not None and samples.rows:
        console.print(_samples(samples))


def _printable(value: Any) -> Text:
    """``value`` as plain text without markup; unprintable characters are spelled out, long text is cut."""
    text = "-" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)
    text = spelled_out(text, one_line=True)
    return Text(text if len(text) <= _MAX_TEXT else text[: _MAX_TEXT - 1] + "…")


def _figures(run: RunData, width: int) -> Table:
    columns = ("first", "last", "lowest", "highest")
    table = _new_table("Figures by training step", "metric", *columns)
    rows = [
        (_printable(name), [_printable(value) for value in (values[0], values[-1], min(values), max(values))])
        for name, values in key_metrics(run)
    ]
    figures = [
        max([len(column), *(cells[index].cell_len for _, cells in rows)]) for index, column in enumerate(columns)
    ]
    left = width - sum(figures) - _BORDERS * (len(columns) + 1) - 1
    for name, cells in rows:  # a name that does not fit takes two lines, section and metric: no word is broken
        table.add_row(name if name.cell_len <= left else Text(name.plain.replace("/", "/\n", 1)), *cells)
    return table


def _phases(picture: PhasePicture) -> Table:
    table = _new_table("Where the time went", "phase", "share", "mean seconds a step", "longest")
    for (phase, seconds), (_, share) in zip(picture.parts, picture.shares, strict=True):
        table.add_row(*map(_printable, (phase, f"{share:.1f}%", fmean(seconds), max(seconds))))
    return table


def _samples(stored: StoredTable) -> Table:
    columns: list[str] = [name for name in ("Step", "Prompt", "Response", "Advantages") if name in stored.columns]
    columns += [name for name in stored.columns if name.startswith("Reward_")]
    table = _new_table("Newest samples", *columns)
    for row in stored.rows[-_NEWEST_SAMPLES:]:
        table.add_row(*(_printable(row.get(column)) for column in columns))
    return table


def _new_table(title: str, *columns: str) -> Table:
    table = Table(title=Text(title), title_justify="left")
    for column in columns:
        table.add_column(_printable(column), overflow="fold")
    return table
