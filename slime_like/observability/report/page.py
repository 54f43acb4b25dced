"""The report as one HTML page that needs nothing else.

A model's output is hostile text. It reaches the page escaped, or as JSON that the script shows as text; the page's
content security policy admits the page's style and script by hash, and neither the network nor any other script.
"""

import base64
import hashlib
import json
from importlib.resources import files
from typing import Any

from slime_like.observability.report.data import Row, RunData, StoredTable, spelled_out, summary
from slime_like.observability.report.panels import panels, phase_picture
from slime_like.observability.tables import SAMPLE_TABLE, TOKEN_TABLE

# Characters of one cell that the page shows; a table of 32k-token responses would not open otherwise.
MAX_CELL_TEXT = 4_000
_LONG_TEXT = 24

SampleKey = tuple[int, Any]


def render_page(run: RunData) -> str:
    """The whole page."""
    from jinja2 import Environment

    # No template inheritance and no loader: the one template is a file of this package.
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.policies["json.dumps_kwargs"] = {"allow_nan": False, "separators": (",", ":")}
    environment.filters |= {"hash": _hash, "plain": _plain, "sample": _key, "shown": _shown}
    drawn, missing = panels(run)
    tokens = run.tables.get(TOKEN_TABLE)
    samples = _token_samples(tokens)
    return environment.from_string(_asset("page.html")).render(
        run=run,
        summary=summary(run),
        drawn=drawn,
        missing=missing,
        phases=phase_picture(run),
        tables=[table for name, table in run.tables.items() if name != TOKEN_TABLE],
        tokens=tokens,
        samples={key: index for index, key in enumerate(samples)},
        sample_table=SAMPLE_TABLE,
        long_text=_LONG_TEXT,
        chart_data=[panel.data() for panel in drawn],
        token_data=_token_data(samples),
        style=f"\n{_asset('page.css')}",
        script=f"\n{_asset('page.js')}",
    )


def _asset(name: str) -> str:
    """A file of this package. Nothing that a run holds is ever put into style or script."""
    return files(__package__).joinpath(name).read_text(encoding="utf-8")


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _shown(text: str) -> str:
    if len(text) > MAX_CELL_TEXT:
        text = f"{text[:MAX_CELL_TEXT]} … ({len(text) - MAX_CELL_TEXT} more characters)"
    return spelled_out(text)


def _key(row: Row) -> SampleKey:
    return row["step"], row.get("Sequence ID")


def _token_samples(table: StoredTable | None) -> dict[SampleKey, list[Row]]:
    """Tokens by sample, the newest step first."""
    samples: dict[SampleKey, list[Row]] = {}
    for row in table.rows if table else []:
        samples.setdefault(_key(row), []).append(row)
    return dict(sorted(samples.items(), key=lambda item: -item[0][0]))


def _token_data(samples: dict[SampleKey, list[Row]]) -> dict[str, Any]:
    named = dict.fromkeys(column for rows in samples.values() for column in rows[0])
    columns = [column for column in named if column not in ("step", "Step", "Sequence ID")]
    return {
        "columns": columns,
        "samples": [
            {
                "label": f"step {step}, {sequence_id}, {len(rows)} tokens",
                "note": _cut_note(rows[0].get("Token Position", 0)),
                "rows": [[_short(row.get(column)) for column in columns] for row in rows],
            }
            for (step, sequence_id), rows in samples.items()
        ],
    }


def _cut_note(first: int) -> str:
    return f"The first {first} tokens are in the run directory only." if first else ""


def _short(value: Any) -> Any:
    return float(f"{value:.6g}") if isinstance(value, float) else value


def _hash(source: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()
