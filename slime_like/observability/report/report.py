"""A run's report: one self-contained HTML page, or its essentials on a terminal.

A model's output is hostile text. It reaches the page escaped, or as JSON that the script shows as text. The page's
content security policy admits plotly and the page's script by hash, and neither the network nor any other script.
"""

import base64
import hashlib
import json
import os
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slime_like.errors import SlimeLikeError
from slime_like.observability.report.data import Row, RunData, StoredTable, read_run, summary
from slime_like.observability.report.panels import Panel, PhasePicture, panels, phase_picture
from slime_like.observability.report.text import last_user_message, shortened, spelled_out
from slime_like.observability.tables import HELD_OUT_TABLE, SAMPLE_TABLE, TOKEN_TABLE, reading_order, said

if TYPE_CHECKING:
    from rich.console import Console

REPORT_FILE = "report.html"
# Characters of one cell that the page shows; a table of 32k-token responses would not open otherwise.
MAX_CELL_TEXT = 4_000
_LONG_TEXT = 24

SampleKey = tuple[int, Any]


def write_report(run_dir: Path, output: Path | None = None) -> Path:
    """Write a run's summary, curves and debug tables as one HTML file that opens anywhere, also without a network.

    The run may still be going. The file, ``run_dir/report.html`` by default, is replaced if there; returns its path.

    Raises:
        SlimeLikeError: the directory holds no metrics, a file in it is damaged, or ``output`` cannot be written.
    """
    return _write_page(read_run(run_dir), output)


def _write_page(run: RunData, output: Path | None) -> Path:
    page = _render_page(run)
    path = run.run_dir / REPORT_FILE if output is None else output
    if path.is_dir():
        remedy = f"give the file to write, e.g. {path / REPORT_FILE}"
        raise SlimeLikeError("is a directory", code="output-is-directory", who=str(path), remedy=remedy)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # A lone surrogate, as broken text may hold, has no UTF-8; it is spelled out.
        unfinished.write_text(page, encoding="utf-8", errors="backslashreplace")
        unfinished.replace(path)
    except OSError as error:
        problem, remedy = f"cannot be written ({error.strerror})", "choose another output file"
        raise SlimeLikeError(problem, code="output-not-writable", who=str(path), remedy=remedy) from error
    return path


def print_report(run_dir: Path, console: "Console | None" = None) -> None:
    """Print a run's summary, key figures, phases and newest samples, on standard output by default.

    Raises:
        SlimeLikeError: the directory holds no metrics, or a file in it is damaged.
    """
    from slime_like.observability.report.console import show
    from slime_like.system.console import Console

    show(read_run(run_dir), console or Console())


def print_and_write_report(run_dir: Path, output: Path | None = None) -> Path:
    """Do both, the page first, and read the run once: both show the same. Returns the page's path."""
    from slime_like.observability.report.console import show
    from slime_like.system.console import Console

    run = read_run(run_dir)
    page = _write_page(run, output)
    show(run, Console())
    return page


# --------------------------------------------------------------------------------------------------------------- page
def _render_page(run: RunData) -> str:
    from jinja2 import Environment
    from plotly.offline import get_plotlyjs

    # No template inheritance and no loader: the one template is a file of this package.
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.policies["json.dumps_kwargs"] = {"allow_nan": False, "separators": (",", ":")}
    environment.filters |= {"hash": _hash, "plain": _plain, "sample": _key, "shown": _shown}
    environment.filters |= {
        "user": last_user_message,
        "reading_order": reading_order,
        "said": said,
        "by_prompt": _by_prompt,
    }
    (drawn, constant, missing), phases = panels(run), phase_picture(run)
    tokens = run.tables.get(TOKEN_TABLE)
    samples = _token_samples(tokens)
    return environment.from_string(_asset("page.html")).render(
        run=run,
        summary=summary(run),
        drawn=drawn,
        constant=constant,
        missing=missing,
        phases=phases,
        tables=[table for name, table in run.tables.items() if name != TOKEN_TABLE],
        tokens=tokens,
        samples={key: index for index, key in enumerate(samples)},
        sample_table=SAMPLE_TABLE,
        held_out_table=HELD_OUT_TABLE,
        titles={SAMPLE_TABLE: "Samples", HELD_OUT_TABLE: "Held-out responses, from evaluation to evaluation"},
        long_text=_LONG_TEXT,
        chart_data=_charts(drawn, phases),
        token_data=_token_data(samples),
        style=f"\n{_asset('page.css')}",
        plotly=get_plotlyjs(),
        script=f"\n{_asset('page.js')}",
    )


def _charts(drawn: Sequence[Panel], phases: PhasePicture | None) -> dict[str, Any]:
    """Figures by the id of the element that they are drawn in."""
    figures = {f"chart-{index}": panel.figure() for index, panel in enumerate(drawn)}
    return figures | ({"phases": phases.figure()} if phases else {})


def _asset(name: str) -> str:
    """A file of this package. Nothing that a run holds is ever put into style or script."""
    return files(__package__).joinpath(name).read_text(encoding="utf-8")


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _shown(text: str) -> str:
    return spelled_out(shortened(text, MAX_CELL_TEXT))


def _key(row: Row) -> SampleKey:
    return row["step"], row.get("Sequence ID")


def _by_prompt(rows: list[Row]) -> list[Row]:
    """Responses to one prompt after each other."""
    return sorted(rows, key=lambda row: str(row.get("Sequence ID")))


def _token_samples(table: StoredTable | None) -> dict[SampleKey, list[Row]]:
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
                "note": f"The first {first} tokens are in the run directory only." if first else "",
                "rows": [[_short(row.get(column)) for column in columns] for row in rows],
            }
            for (step, sequence_id), rows in samples.items()
            for first in [rows[0].get("Token Position", 0)]
        ],
    }


def _short(value: Any) -> Any:
    return float(f"{value:.6g}") if isinstance(value, float) else value


def _hash(source: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()
