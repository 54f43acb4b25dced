"""``slime-like report RUN_DIR``."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from slime_like.commands.arguments import given_path
from slime_like.observability.report import REPORT_FILE, print_report, write_report


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Add the command to what ``ArgumentParser.add_subparsers`` returned."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "report",
        help="look into a run: figures on the terminal, curves and samples as an HTML page",
        description="Print a run's figures and write its curves, phase times and debug tables as one HTML page.",
    )
    parser.add_argument(
        "run_dir", type=given_path, metavar="RUN_DIR", help="directory of the run; it may still be going"
    )
    parser.add_argument(
        "--output", type=Path, metavar="FILE", help=f"where to write the page (default: RUN_DIR/{REPORT_FILE})"
    )
    return parser


def run(arguments: argparse.Namespace) -> int:
    """Print and write. Raises ``SlimeLikeError`` where there is nothing to report."""
    print_report(arguments.run_dir)
    print(f"report: {write_report(arguments.run_dir, arguments.output)}")
    return 0
