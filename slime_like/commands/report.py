"""``slime-like report RUN_DIR``."""

import argparse
from pathlib import Path

from slime_like.commands.command import Command, given_path, option
from slime_like.system.words import counted


def _run(arguments: argparse.Namespace, _: list[str]) -> int:
    if arguments.audit:
        return _audit(arguments.run_dir)
    from slime_like.observability.report.data import read_run
    from slime_like.observability.report.report import print_summary, write_page
    from slime_like.system.console import Console

    run = read_run(arguments.run_dir)
    page = write_page(run, arguments.output)  # first, because nobody may read the terminal
    print_summary(run, Console())
    print(f"report: {page}")
    return 0


def _audit(run_dir: Path) -> int:
    """Print the sums of the ledger. Return 1 if they do not match."""
    from slime_like.data.ledger import audit_run

    audit = audit_run(run_dir)
    dropped = sum(audit.dropped.values())
    reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(audit.dropped.items()))
    print(
        f"audit: {counted(audit.issued, 'group')} issued = {audit.trained} trained + {dropped} dropped"
        f"{f' ({reasons})' if reasons else ''} + {len(audit.in_flight)} in flight"
    )
    if audit.failed:
        outcomes = ", ".join(f"{count} {outcome}" for outcome, count in sorted(audit.failed.items()))
        print(f"audit: {counted(sum(audit.failed.values()), 'rollout')} failed ({outcomes})")
    for problem in audit.problems:
        print(f"audit: {problem}")
    print(f"audit: {counted(len(audit.problems), 'problem')}" if audit.problems else "audit: holds")
    return 1 if audit.problems else 0


COMMAND = Command(
    "report",
    "show a run: metrics on the terminal, curves and samples as an HTML page",
    _run,
    "Print a run's metrics, and write its curves, phase times and debug tables as one HTML page.",
    (
        option("run_dir", type=given_path, metavar="RUN_DIR", help="directory of the run, which may still be running"),
        option("--output", type=Path, metavar="FILE", help="where to write the page (default: RUN_DIR/report.html)"),
        option("--audit", action="store_true", help="only check the ledger: issued = trained + dropped + in flight"),
    ),
    takes_flags=False,
)
