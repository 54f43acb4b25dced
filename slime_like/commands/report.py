"""``slime-like report RUN_DIR`` and ``slime-like explain-gap RUN_DIR``."""

import argparse
import json
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from slime_like.commands.command import (
    Command,
    at_least_one,
    has_flag,
    option,
    output_problem,
    parse_path,
    temporary_run_dir,
)
from slime_like.errors import FAILED, ConfigError
from slime_like.system.disk import whole_file
from slime_like.system.words import pluralize

if TYPE_CHECKING:
    from slime_like.verification.explain_gap import Finding


def _report(arguments: argparse.Namespace, _: list[str]) -> int:
    if arguments.audit:
        return _audit(arguments.run_dir)
    if arguments.trace is not None:
        from slime_like.observability.report.trace import write_trace

        path, dropped = write_trace(arguments.run_dir, arguments.trace or None)
        print(f"trace: {path}, for https://ui.perfetto.dev" + (f"; {dropped} spans were dropped" if dropped else ""))
        return 0
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
    lost = f"{dropped} dropped" + (f" ({reasons})" if reasons else "")
    sums = f"{audit.trained} trained + {lost} + {len(audit.in_flight)} in flight"
    print(f"audit: {pluralize(audit.issued, 'group')} issued = {sums}")
    if audit.failed:
        outcomes = ", ".join(f"{count} {outcome}" for outcome, count in sorted(audit.failed.items()))
        print(f"audit: {pluralize(sum(audit.failed.values()), 'rollout')} failed ({outcomes})")
    for problem in audit.problems:
        print(f"audit: {problem}")
    print(f"audit: {pluralize(len(audit.problems), 'problem')}" if audit.problems else "audit: holds")
    return 1 if audit.problems else 0


REPORT = Command(
    "report",
    "show a run: metrics on the terminal, curves and samples as an HTML page",
    _report,
    "Print a run's metrics, and write its curves, phase times and debug tables as one HTML page.",
    (
        option("run_dir", type=parse_path, metavar="RUN_DIR", help="directory of the run, which may still be running"),
        option("--output", type=Path, metavar="FILE", help="where to write the page (default: RUN_DIR/report.html)"),
        option("--trace", type=Path, nargs="?", const=False, metavar="FILE", help="only write the trace for Perfetto"),
        option("--audit", action="store_true", help="only check the ledger: issued = trained + dropped + in flight"),
    ),
    takes_flags=False,
)


def _explain_gap(options: argparse.Namespace, flags: list[str]) -> int:
    from slime_like.checks import training_needs
    from slime_like.checks.check import require_valid
    from slime_like.orchestration.cluster.bundles import pieces_of
    from slime_like.orchestration.cluster.cluster import Cluster
    from slime_like.orchestration.run.lock import RunLock
    from slime_like.verification.explain_gap import Explanation
    from slime_like.verification.saved_batch import SavedBatch, Sides

    batch = SavedBatch.read(options.run_dir, options.step, flags)
    require_valid(batch.config, training_needs(batch.config))
    logs, slots = batch.config.run_dir / "gap_worker_logs", sum(pieces_of(batch.config).bundles)
    with RunLock(options.run_dir), Cluster(batch.config.cluster, logs, slots) as cluster:
        print(f"{'without':12} {'mean':>8} {'max':>8} {'share':>6}  finding")
        found = Explanation(batch, partial(Sides.opened, cluster.run_name), _print_finding)
    rest = "rounding" if found.is_rounding() else "unexplained"
    print(f"{'':30} {found.share:>6.0%}  {rest}")
    main = max(found.findings, key=lambda finding: finding.share)
    share, name = (main.share, main.name) if main.share >= found.share else (found.share, rest)
    print(f"{100 * share:.0f} % of the gap is {name}")
    return 0


def _print_finding(finding: "Finding") -> None:
    gap = " ".join(f"{nats:8.1e}" for nats in finding.gap or ())
    share = f"{finding.share:.0%}" if finding.share else ""
    print(f"{finding.cause:12} {gap:17} {share:>6}  {finding.text}", flush=True)


EXPLAIN_GAP = Command(
    "explain-gap",
    "find why the logprobs of a run's engine and trainer differ",
    _explain_gap,
    "Remove possible causes of the gap between engine and trainer on a saved batch (debug.save_rollouts), one\n"
    "after the other: stale weights, temperature, truncation, prompt ids, weights, routing of experts, layout,\n"
    "precision. The run's trainer and engines start with the checkpoint of the step before.",
    (option("--step", type=at_least_one, metavar="N", help="step of the batch (default: the latest usable)"),),
    "[--step N] [--section.field VALUE ...]",
    {"RUN_DIR": "directory of a run that has ended"},
    epilog="Flags override the run's configuration, e.g. --cluster.address.",
)


def _replay(options: argparse.Namespace, flags: list[str]) -> int:
    from slime_like.checks import RANKS, loading_needs
    from slime_like.checks.check import require_valid
    from slime_like.verification.replay import Capsule, replay

    if options.output is not None and (problem := output_problem(options.output, {})):
        raise ConfigError(problem, code="file-unusable")
    capsule, temporary = Capsule.read(options.capsule), not has_flag(flags, "run_dir")
    config = capsule.config([*(["--run_dir", str(temporary_run_dir("replay"))] if temporary else []), *flags])
    if config.run_dir.exists():
        raise ConfigError(f"run_dir={config.run_dir}: exists; give a new directory", code="run-dir-exists")
    require_valid(config, loading_needs(config.model, RANKS))
    print(f"{'step':>6} {'values':>9} {'largest':>9} {'bound':>9}  quantity")
    lines = []
    for line in replay(capsule, config, temporary):
        lines.append(line)
        verdict = "DIFFERS" if line.wrong else ""
        sizes = f"{line.count:>9} {line.largest:>9.1e} {line.bound:>9.1e}"
        print(f"{line.step:>6} {sizes}  {line.quantity:24} {verdict}", flush=True)
    wrong = [line for line in lines if line.wrong]
    if options.output is not None:
        with whole_file(options.output) as file:
            json.dump({"capsule": str(options.capsule), "same": not wrong, "lines": list(map(asdict, lines))}, file)
    print(*wrong, f"{len(lines) - len(wrong)} of {pluralize(len(lines), 'comparison')} are as recorded", sep="\n")
    return FAILED if wrong else 0


REPLAY = Command(
    "replay",
    "train a recorded step again, under any parallel layout, and compare with the run",
    _replay,
    "Train the steps of a capsule (debug.capsule) again, from the checkpoint before it, on the recorded batches.\n"
    "Compare advantages, values of every token, figures of every update, and weights with what the run computed:\n"
    "bit for bit in the run's layout on a CPU, else within rounding. Starts trainer ranks, but no engines.\n"
    "Exit code 1: something differs; the first token or tensor is named.",
    (option("--output", type=Path, metavar="FILE", help="also write the comparison as JSON"),),
    "[--output FILE] [--trainer.parallel.tensor 2 ...]",
    {"CAPSULE": "RUN_DIR/capsules/step-N"},
    epilog="Flags override the run's configuration, e.g. --trainer.backend, --cluster.address.",
)
