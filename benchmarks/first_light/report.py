"""The report of a first run, in Markdown."""

import datetime
import platform
from collections.abc import Sequence

from benchmarks.first_light.machine import Machine
from benchmarks.first_light.running import Result


def render(machine: Machine, results: Sequence[Result], command: str) -> str:
    """Device, versions, what passed, what was skipped and why, and the tables of parts that have one."""
    lines = [
        f"# First run: {machine.device}",
        "",
        f"`{command}`, {datetime.date.today()}, Python {platform.python_version()}, "
        + ", ".join(f"{name} {version}" for name, version in machine.packages.items()),
        "",
        "| stage | part | outcome | tests passed | failed | skipped | seconds |",
        "|---|---|---|---|---|---|---|",
        *map(_row, results),
    ]
    remarks = [remark for result in results for remark in _remarks(result)]
    if remarks:
        lines += ["", *remarks]
    for result in results:
        table = result.part.table
        if table is not None and table.exists():
            lines += ["", f"## {result.part.name}", "", table.read_text(encoding="utf-8").strip()]
    return "\n".join(lines) + "\n"


def _row(result: Result) -> str:
    counts = result.counts
    tests = ["", "", ""] if counts is None else [counts.passed, counts.failed, counts.skipped.total()]
    cells = [result.part.stage, result.part.name, result.outcome, *tests, f"{result.seconds:.0f}"]
    return f"| {' | '.join(map(str, cells))} |"


def _remarks(result: Result) -> list[str]:
    skipped = [] if result.counts is None else [f"{n} skipped: {why}" for why, n in result.counts.skipped.items()]
    return [f"- **{result.part.name}**: {text}" for text in skipped or filter(None, [result.reason])]
