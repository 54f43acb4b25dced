"""The report as one HTML page that needs nothing else.

A model's output is hostile text. It reaches the page escaped, or as JSON that the script shows as text; the page's
content security policy admits the page's style and script by hash, and neither the network nor any other script.
"""

import base64
import hashlib
import json
from collections.abc import Sequence
from html import escape
from importlib.resources import files
from string import Template
from typing import Any

from slime_like.observability.report.charts import LEFT, RIGHT, WIDTH, line_chart, stacked_bars, step_scale, thinned
from slime_like.observability.report.data import Row, RunData, StoredTable, summary
from slime_like.observability.report.panels import Panel, panels, phase_picture
from slime_like.observability.report.text import spelled_out
from slime_like.observability.tables import TOKEN_TABLE

# Characters of one cell that the page shows; a table of 32k-token responses would not open otherwise.
MAX_CELL_TEXT = 4_000
_LONG_TEXT = 24
_TITLES = {"per_sample_debug_table": "Samples"}
_SWATCHES = ("0.0001", "0.001", "0.01", "0.1", "1")

SampleKey = tuple[int, Any]


def render_page(run: RunData) -> str:
    """The whole page."""
    drawn, missing = panels(run)
    samples = _token_samples(run.tables.get(TOKEN_TABLE))
    tables = [table for name, table in run.tables.items() if name != TOKEN_TABLE]
    body = [
        _head(run),
        _charts(drawn, missing),
        _phases(run),
        *(_table(table, {key: index for index, key in enumerate(samples)}) for table in tables),
        _token_view(run.tables.get(TOKEN_TABLE)),
        _configuration(run.config_text),
        _json_block("chart-data", [_chart_data(panel) for panel in drawn]),
        _json_block("token-data", _token_data(samples)),
    ]
    return _document(f"Run {run.run_dir.name}", "\n".join(body))


# ------------------------------------------------------------------------------------------------------------- sections
def _document(title: str, body: str) -> str:
    style, script = f"\n{_asset('page.css')}", f"\n{_asset('page.js')}"
    policy = f"default-src 'none'; style-src '{_hash(style)}'; script-src '{_hash(script)}'; base-uri 'none'"
    page = Template(_asset("page.html"))
    return page.substitute(title=escape(title), body=body, style=style, script=script, policy=policy)


def _asset(name: str) -> str:
    """A file of this package. Nothing that a run holds is ever put into style or script."""
    return files(__package__).joinpath(name).read_text(encoding="utf-8")


def _head(run: RunData) -> str:
    entries = "".join(f"<dt>{escape(label)}</dt><dd>{escape(text)}</dd>" for label, text in summary(run))
    return (
        f'<h1>Run {escape(run.run_dir.name)}</h1>\n<p class="soft">{escape(str(run.run_dir))}</p>\n<dl>{entries}</dl>'
    )


def _charts(drawn: Sequence[Panel], missing: Sequence[str]) -> str:
    figures = "\n".join(_figure(index, panel) for index, panel in enumerate(drawn))
    note = f'<p class="soft">Not logged in this run: {escape(", ".join(missing))}.</p>' if missing else ""
    return f'<h2>Curves by training step</h2>\n<div class="charts">\n{figures}\n</div>\n{note}'


def _figure(index: int, panel: Panel) -> str:
    keys = "".join(
        f'<span class="key series-{line.colour}"></span>{escape(line.label)}' for line in panel.lines if not line.faint
    )
    bad = len(panel.non_finite_steps)
    warning = f" NaN or infinite at {bad} step{'s' if bad > 1 else ''} (marked)." if bad else ""
    return (
        f'<figure id="chart-{index}"><figcaption><h3>{escape(panel.title)}</h3>'
        f"<span>{escape(panel.caption)}{warning}</span></figcaption>"
        f'<div class="readout">{keys}</div>{line_chart(panel.lines, panel.non_finite_steps, panel.title)}</figure>'
    )


def _phases(run: RunData) -> str:
    picture = phase_picture(run)
    if picture is None:
        return ""
    keys = "".join(
        f'<span class="key part-{escape(phase)}"></span>{escape(phase)} {share:.1f}%' for phase, share in picture.shares
    )
    svg = stacked_bars(picture.steps, picture.parts, "s", "Seconds of each phase by training step")
    return (
        '<h2>Where the time went</h2>\n<figure id="phases"><figcaption><h3>Seconds a step, by phase</h3>'
        "<span>Percentages are of the whole run's step time; orchestration is what lies between the phases. "
        "A triangle marks a bar that is taller than drawn.</span></figcaption>"
        f'<div class="readout">{keys}</div>{svg}</figure>'
    )


def _table(table: StoredTable, token_samples: dict[SampleKey, int]) -> str:
    has_tokens = any(_key(row) in token_samples for row in table.rows)
    header = "".join(f"<th>{escape(column)}</th>" for column in (["Tokens"] if has_tokens else []) + table.columns)
    rows = "\n".join(_row(table, row, has_tokens, token_samples) for row in sorted(table.rows, key=_newest_first))
    left_out = f" The oldest {table.left_out} rows are in the run directory only." if table.left_out else ""
    title = escape(_TITLES.get(table.name, table.name))
    return (
        f'<section class="table" id="table-{escape(table.name)}"><h2>{title}</h2>\n'
        f'<div class="tools"><label>Filter <input type="search"></label><span class="shown soft"></span>'
        f'<span class="soft">Click a heading to sort.{left_out}</span></div>\n'
        f'<div class="scroll"><table><thead><tr>{header}</tr></thead>\n<tbody>\n{rows}\n</tbody></table></div>'
        "</section>"
    )


def _row(table: StoredTable, row: Row, has_tokens: bool, token_samples: dict[SampleKey, int]) -> str:
    cells = [_cell(row.get(column)) for column in table.columns]
    if has_tokens:
        index = token_samples.get(_key(row))
        button = '<td class="none">-</td>'
        if index is not None:
            button = f'<td><button type="button" data-sample="{index}">show</button></td>'
        cells.insert(0, button)
    return f"<tr>{''.join(cells)}</tr>"


def _cell(value: Any) -> str:
    if value is None:
        return '<td class="none">-</td>'
    if isinstance(value, bool):
        return f'<td data-value="{int(value)}">{"yes" if value else "no"}</td>'
    if isinstance(value, int | float):
        text = f"{value:.5g}" if isinstance(value, float) else str(value)
        return f'<td class="number" data-value="{value!r}">{text}</td>'
    text = value if isinstance(value, str) else json.dumps(value)
    kind = "text long" if len(text) > _LONG_TEXT else "text"
    if len(text) > MAX_CELL_TEXT:
        text = f"{text[:MAX_CELL_TEXT]} … ({len(text) - MAX_CELL_TEXT} more characters)"
    return f'<td><div class="{kind}" dir="auto">{escape(spelled_out(text))}</div></td>'


def _token_view(table: StoredTable | None) -> str:
    if table is None or not table.rows:
        return ""
    swatches = "".join(f'<span class="shade">{value}</span>' for value in _SWATCHES)
    left_out = f" The oldest {table.left_out} tokens are in the run directory only." if table.left_out else ""
    return (
        '<section id="token-view"><h2>Tokens of a sample</h2>\n<div class="tools">'
        '<label>Sample <select id="sample"></select></label><label>Shade by <select id="shade"></select></label>'
        f'<span class="soft">gap in nats: {swatches}</span></div>\n'
        '<p class="soft"><span id="sample-note"></span> Struck-through tokens carry no loss; dotted ones have no such '
        f'logprob. Point at a token for its figures.{left_out}</p>\n<div id="tokens"></div>\n'
        '<details><summary>As a table</summary><div class="scroll"><table id="token-details"><thead><tr></tr></thead>'
        "<tbody></tbody></table></div></details></section>"
    )


def _configuration(text: str | None) -> str:
    if text is None:
        return ""
    return (
        f"<h2>Configuration</h2>\n<details><summary>Resolved configuration</summary><pre>{escape(text)}</pre></details>"
    )


# ----------------------------------------------------------------------------------------------------------------- data
def _chart_data(panel: Panel) -> dict[str, Any]:
    scale = step_scale([step for line in panel.lines for step in line.steps] + panel.non_finite_steps)
    lines = [
        {"label": line.label, "steps": list(line.steps), "values": [float(f"{value:.6g}") for value in line.values]}
        for line in map(thinned, panel.lines)
    ]
    return {"left": LEFT, "right": WIDTH - RIGHT, "low": scale.low, "high": scale.high, "lines": lines}


def _token_samples(table: StoredTable | None) -> dict[SampleKey, list[Row]]:
    """Tokens by sample, the newest step first."""
    samples: dict[SampleKey, list[Row]] = {}
    for row in table.rows if table else []:
        samples.setdefault(_key(row), []).append(row)
    return dict(sorted(samples.items(), key=lambda item: -item[0][0]))


def _token_data(samples: dict[SampleKey, list[Row]]) -> dict[str, Any]:
    every = {column for rows in samples.values() for row in rows for column in row}
    columns = [column for rows in samples.values() for column in rows[0]]
    columns = [column for column in dict.fromkeys(columns) if column in every - {"step", "Step", "Sequence ID"}]
    return {
        "columns": columns,
        "samples": [
            {
                "label": f"step {step}, {sequence_id}, {len(rows)} tokens",
                "note": _cut_note(rows),
                "rows": [[_short(row.get(column)) for column in columns] for row in rows],
            }
            for (step, sequence_id), rows in samples.items()
        ],
    }


def _cut_note(rows: Sequence[Row]) -> str:
    first = rows[0].get("Token Position", 0)
    return f"The first {first} tokens are in the run directory only." if first else ""


def _newest_first(row: Row) -> int:
    return -int(row["step"])


def _key(row: Row) -> SampleKey:
    return row["step"], row.get("Sequence ID")


def _short(value: Any) -> Any:
    return float(f"{value:.6g}") if isinstance(value, float) else value


def _json_block(element_id: str, value: Any) -> str:
    """Data for the script. No character that HTML could read as markup is left in it."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return f'<script type="application/json" id="{element_id}">{text}</script>'


def _hash(source: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()
