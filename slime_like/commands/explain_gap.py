"""``slime-like explain-gap RUN_DIR``."""

import argparse
from functools import partial
from typing import TYPE_CHECKING

from slime_like.commands.command import Command, at_least_one, option

if TYPE_CHECKING:
    from slime_like.verification.gap.explain import Finding


def _run(options: argparse.Namespace, flags: list[str]) -> int:
    from slime_like.checks.check import require_valid
    from slime_like.checks.definition import training_needs
    from slime_like.orchestration.cluster.bundles import pieces_of
    from slime_like.orchestration.cluster.cluster import Cluster
    from slime_like.orchestration.run.lock import RunLock
    from slime_like.verification.gap.batch import SavedBatch
    from slime_like.verification.gap.explain import Explanation
    from slime_like.verification.gap.sides import Sides

    batch = SavedBatch.read(options.run_dir, options.step, flags)
    require_valid(batch.config, training_needs(batch.config))
    logs, slots = batch.config.run_dir / "gap_worker_logs", sum(pieces_of(batch.config).bundles)
    with RunLock(options.run_dir), Cluster(batch.config.cluster, logs, slots) as cluster:
        print(f"{'without':12} {'mean':>8} {'max':>8} {'share':>6}  finding")
        found = Explanation(batch, partial(Sides.opened, cluster.run_name), _show)
    rest = "rounding" if found.is_rounding() else "unexplained"
    print(f"{'':30} {found.share:>6.0%}  {rest}")
    main = max(found.findings, key=lambda finding: finding.share)
    share, name = (main.share, main.name) if main.share >= found.share else (found.share, rest)
    print(f"{100 * share:.0f} % of the gap is {name}")
    return 0


def _show(finding: "Finding") -> None:
    gap = " ".join(f"{nats:8.1e}" for nats in finding.gap or ())
    share = f"{finding.share:.0%}" if finding.share else ""
    print(f"{finding.cause:12} {gap:17} {share:>6}  {finding.text}", flush=True)


COMMAND = Command(
    "explain-gap",
    "find why the logprobs of a run's engine and trainer differ",
    _run,
    "Remove possible causes of the gap between engine and trainer on a saved batch (debug.save_rollouts), one\n"
    "after the other: stale weights, temperature, truncation, prompt ids, weights, routing of experts, layout,\n"
    "precision. The run's trainer and engines start with the checkpoint of the step before.",
    (option("--step", type=at_least_one, metavar="N", help="step of the batch (default: the latest usable)"),),
    "[--step N] [--section.field VALUE ...]",
    {"RUN_DIR": "directory of a run that has ended"},
    epilog="Flags override the run's configuration, e.g. --cluster.address.",
)
