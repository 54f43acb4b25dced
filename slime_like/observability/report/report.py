"""Look into a run: one self-contained HTML page, or its essentials on a terminal."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from slime_like.errors import SlimeLikeError
from slime_like.observability.report.data import read_run
from slime_like.observability.report.page import render_page

if TYPE_CHECKING:
    from rich.console import Console

REPORT_FILE = "report.html"


def write_report(run_dir: Path, output: Path | None = None) -> Path:
    """Write a run's summary, curves and debug tables as one HTML file that opens anywhere, also without a network.

    The run may still be going. The file, ``run_dir/report.html`` by default, is replaced if there; returns its path.

    Raises:
        SlimeLikeError: the directory holds no metrics, a file in it is damaged, or ``output`` cannot be written.
    """
    page = render_page(read_run(run_dir))
    path = run_dir / REPORT_FILE if output is None else output
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


def print_report(run_dir: Path, console: Console | None = None) -> None:
    """Print a run's summary, key figures, phases and newest samples, on standard output by default.

    Raises:
        SlimeLikeError: the directory holds no metrics, or a file in it is damaged.
    """
    from rich.console import Console

    from slime_like.observability.report.console import show

    show(read_run(run_dir), console or Console())
