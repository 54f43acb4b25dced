"""Report of a run: one self-contained HTML page, and tables on a terminal.

A model's output is hostile text. It reaches the page escaped, or as JSON that the script shows as text. The content
security policy allows only plotly and the page's script, by hash, and no network.
"""

import base64
import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from importlib.resources import files
from pathlib import Path
from statistics import fmean
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from slime_like.errors import SlimeLikeError
from slime_like.observability.metrics import REPORT_FILE
from slime_like.observability.report.data import Row, RunData, shorten, spell_out, summary
from slime_like.observability.report.panels import key_metrics, panels, phase_picture
from slime_like.observability.tables import HELD_OUT_TABLE, SAMPLE_TABLE, TOKEN_TABLE, reading_order, response_column
from slime_like.system.disk import whole_file

# Characters shown of one cell. With more, a table of 32k-token responses would not open.
MAX_CELL_TEXT = 4_000
_LONG_TEXT = 24
_NEWEST_SAMPLES = 4
_MAX_TEXT = 240

SampleKey = tuple[int, Any]


def write_page(run: RunData, output: Path | None = None) -> Path:
    """Write a run's summary, curves and debug tables as one HTML file, and return its path.

    The default is ``run_dir/report.html``. An existing file is replaced.

    Raises:
        SlimeLikeError: ``output`` cannot be written.
    """
    page = _render_page(run)
    path = run.run_dir / REPORT_FILE if output is None else output
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(path) as file:
            # Lone surrogates in broken text have no UTF-8 form.
            file.write(page.encode(errors="backslashreplace").decode())
    except OSError as error:
        problem, remedy = f"cannot be written ({error.strerror})", "choose another output file"
        raise SlimeLikeError(problem, code="output-not-writable", who=str(path), remedy=remedy) from error
    return path


def _render_page(run: RunData) -> str:
    from jinja2 import Environment
    from plotly.offline import get_plotlyjs

    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.policies["json.dumps_kwargs"] = {"allow_nan": False, "separators": (",", ":")}
    environment.filters |= {
        "hash": lambda text: "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode(),
        "plain": lambda value: value if isinstance(value, str) else json.dumps(value),
        "sample": _key,
        "shown": lambda text: spell_out(shorten(text, MAX_CELL_TEXT)),
        "reading_order": reading_order,
        "response_column": response_column,
    }
    drawn, phases = panels(run), phase_picture(run)
    tokens = run.tables.get(TOKEN_TABLE)
    samples: dict[SampleKey, list[Row]] = {}
    for row in tokens.rows if tokens else []:
        samples.setdefault(_key(row), []).append(row)
    samples = dict(sorted(samples.items(), key=lambda item: -item[0][0]))
    figures = {f"chart-{index}": panel.figure for index, panel in enumerate(drawn)}  # by the element's id
    return environment.from_string(_asset("page.html")).render(
        run=run,
        summary=summary(run),
        drawn=drawn,
        phases=phases,
        tables=[table for name, table in run.tables.items() if name != TOKEN_TABLE],
        tokens=tokens,
        samples={key: index for index, key in enumerate(samples)},
        sample_table=SAMPLE_TABLE,
        held_out_table=HELD_OUT_TABLE,
        titles={SAMPLE_TABLE: "Samples", HELD_OUT_TABLE: "Held-out responses, from evaluation to evaluation"},
        long_text=_LONG_TEXT,
        chart_data=figures | ({"phases": phases.figure()} if phases else {}),
        token_data=_token_data(samples),
        style=f"\n{_asset('page.css')}",
        plotly=get_plotlyjs(),
        script=f"\n{_asset('page.js')}",
    )


def _asset(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")


def _key(row: Row) -> SampleKey:
    return row["step"], row.get("Sequence ID")


def _token_data(samples: dict[SampleKey, list[Row]]) -> dict[str, Any]:
    named = dict.fromkeys(column for rows in samples.values() for column in rows[0])
    columns = [column for column in named if column not in ("step", "Step", "Sequence ID")]

    def number(value: Any) -> Any:
        return float(f"{value:.6g}") if isinstance(value, float) else value

    return {
        "columns": columns,
        "samples": [
            {
                "label": f"step {step}, {sequence_id}, {len(rows)} tokens",
                "note": f"The first {first} tokens are in the run directory only." if first else "",
                "rows": [[number(row.get(column)) for column in columns] for row in rows],
            }
            for (step, sequence_id), rows in samples.items()
            for first in [rows[0].get("Token Position", 0)]
        ],
    }


def print_summary(run: RunData, console: Console) -> None:
    """Print a run's summary, metrics, phases, newest samples and held-out responses."""
    console.print(_list_groups(f"Run {run.run_dir.name}", [summary(run)]))
    if run.trained_steps:
        columns = "metric", "first", "last", "lowest", "highest"
        metrics = [(name, each[0], each[-1], min(each), max(each)) for name, each in key_metrics(run, panels(run))]
        console.print(_draw_table("Metrics by training step", columns, metrics))
    if picture := phase_picture(run):
        phases = [(phase, f"{share:.1f}%", fmean(seconds), max(seconds)) for phase, seconds, share in picture.parts]
        console.print(_draw_table("Where the time went", ("phase", "share", "mean seconds a step", "longest"), phases))
    for name, title in ((SAMPLE_TABLE, "Newest samples"), (HELD_OUT_TABLE, "Newest held-out responses")):
        if (table := run.tables.get(name)) is not None and table.rows:
            console.print(_list_groups(title, map(_cells, table.rows[-_NEWEST_SAMPLES:])))


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
    return Text(spell_out(shorten(text, _MAX_TEXT), one_line=True))


def _list_groups(title: str, groups: Iterable[Iterable[tuple[str, Any]]]) -> Table:
    table = Table(title=Text(title), show_header=False, title_justify="left")
    for group in groups:
        for label, value in group:
            table.add_row(_printable(label), _printable(value))
        table.add_section()
    return table


def _draw_table(title: str, columns: Sequence[str], rows: Sequence[tuple[Any, ...]]) -> Table:
    table = Table(title=Text(title), title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for column in columns:
        table.add_column(_printable(column), overflow="fold")
    for row in rows:
        table.add_row(*map(_printable, row))
    return table
