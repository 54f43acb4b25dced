"""Summary of a run as tables on a terminal."""

from collections.abc import Sequence
from statistics import fmean
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from slime_like.observability.report.data import RunData, summary
from slime_like.observability.report.panels import key_metrics, panels, phase_picture
from slime_like.observability.report.text import last_user_message, shortened, spelled_out
from slime_like.observability.tables import HELD_OUT_TABLE, SAMPLE_TABLE, response_column
from slime_like.system.words import counted

_NEWEST_SAMPLES = 4
_MAX_TEXT = 240


def show(run: RunData, console: Console) -> None:
    """Print a run's summary, metrics, phases, newest samples and held-out responses."""
    console.print(_labelled(f"Run {run.run_dir.name}", [summary(run)]))
    drawn, constant, _ = panels(run)
    if run.trained_steps:
        columns = "metric", "first", "last", "lowest", "highest"
        metrics = [(name, each[0], each[-1], min(each), max(each)) for name, each in key_metrics(run, drawn)]
        console.print(_ruled("Metrics by training step", columns, metrics))
    if constant:
        console.print(Text(f"The same at every step: {'; '.join(panel.values for panel in constant)}\n"))
    if picture := phase_picture(run):
        phases = [(phase, f"{share:.1f}%", fmean(seconds), max(seconds)) for phase, seconds, share in picture.parts]
        console.print(_ruled("Where the time went", ("phase", "share", "mean seconds a step", "longest"), phases))
    samples = run.tables.get(SAMPLE_TABLE)
    if samples is not None and samples.rows:
        newest = samples.rows[-_NEWEST_SAMPLES:]
        console.print(_labelled("Newest samples", [_sample(row) for row in newest]))
    held_out = run.tables.get(HELD_OUT_TABLE)
    if held_out is not None and held_out.rows:
        shown, prompts = _held_out(held_out.rows), len({row.get("Sequence ID") for row in held_out.rows})
        title = f"Held-out responses, first and last evaluation ({len(shown)} of {counted(prompts, 'prompt')})"
        console.print(_labelled(title, shown))


def _printable(value: Any) -> Text:
    """Return ``value`` as text without markup or unprintable characters. Long text is shortened."""
    text = "-" if value is None else str(value)
    if isinstance(value, float):
        text = f"{value:,.0f}" if 1e4 <= abs(value) < 1e9 else f"{value:.4g}"
    return Text(spelled_out(shortened(text, _MAX_TEXT), one_line=True))


def _sample(row: dict[str, Any]) -> list[tuple[str, Any]]:
    outcome = {
        "step": row["step"],
        **{name.removeprefix("Reward_"): value for name, value in row.items() if name.startswith("Reward_")},
        "advantage": row.get("Advantages"),
        "finish reason": row.get("Finish Reason"),
    }
    shown = [f"{name} {_printable(value)}" for name, value in outcome.items() if value is not None]
    column = response_column(list(row))  # rows of other steps may have other columns
    response = shortened(str(row.get(column)), _MAX_TEXT)
    lines = response.split("\n") if column == "Conversation" else [response]
    return [
        ("prompt", last_user_message(str(row.get("Prompt", "")))),
        ("response", lines[0]),
        *(("", line) for line in lines[1:]),
        ("answer", row.get("Answer")),
        ("outcome", ", ".join(shown)),
        *([("metadata", metadata)] if (metadata := row.get("Reward Metadata")) else []),
    ]


def _held_out(rows: list[dict[str, Any]]) -> list[list[tuple[str, Any]]]:
    """Return for each prompt the question, the first and the last response, and the answer."""
    by_prompt: dict[Any, list[dict[str, Any]]] = {}
    for row in rows:
        by_prompt.setdefault(row.get("Sequence ID"), []).append(row)
    groups = []
    for responses in list(by_prompt.values())[:_NEWEST_SAMPLES]:
        first, last = responses[0], responses[-1]
        question = ("prompt", last_user_message(str(first.get("Prompt", ""))))
        judged: dict[Any, str] = {None: "", True: ", right", False: ", wrong"}
        shown = {f"step {row['step']}{judged[row.get('Success')]}": row.get("Response") for row in (first, last)}
        groups.append([question, *shown.items(), ("answer", first.get("Answer"))])
    return groups


def _labelled(title: str, groups: list[list[tuple[str, Any]]]) -> Table:
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
