"""Table of the acceptance runs, with its bounds: ``python -m benchmarks.acceptance OUT_DIR RESULT.md``.

Exit code 1 if a bound does not hold.
"""

import datetime
import platform
import sys
from pathlib import Path
from typing import Any

from benchmarks.report import publish, table
from slime_like.observability.metrics import read_metrics

MOST_BEFORE, LEAST_AFTER, MOST_CONTROL_RISE = 0.5, 0.9, 0.05
EIGHT_RANKS, FSDP = "tp2-pp2-cp2", "fsdp"
OTHER_ENGINES = ("sglang", "transformers")  # the seeds run with vLLM
RESUMED = "fsdp-on-two-ranks"
"""A run that continues another one, so that it has no accuracy before training."""


def accuracies(run_dir: Path) -> tuple[float, float]:
    """Return held-out accuracy before the first and after the last step."""
    values = [
        row["evaluation/accuracy"] for row in read_metrics(run_dir / "metrics.jsonl") if "evaluation/accuracy" in row
    ]
    return values[0], values[-1]


def rows(out: Path) -> list[dict[str, Any]]:
    table = []
    learning = [(directory.name, directory / "rl") for directory in sorted(out.glob("seed-*"))]
    others = [(name, out / name) for name in (*OTHER_ENGINES, EIGHT_RANKS, FSDP)]
    for name, run_dir in [*learning, *others]:
        before, after = accuracies(run_dir)
        held = before <= MOST_BEFORE and after >= LEAST_AFTER
        table.append({"run": name, "before": before, "after": after, "held": held})
    (before, _), (_, after) = accuracies(out / FSDP), accuracies(out / RESUMED)
    table.append({"run": RESUMED, "before": before, "after": after, "held": after >= LEAST_AFTER})
    before, after = accuracies(out / "control")
    table.append({"run": "control", "before": before, "after": after, "held": after - before <= MOST_CONTROL_RISE})
    return table


def main() -> int:
    table_rows = rows(Path(sys.argv[1]))
    cells = [(r["run"], f"{r['before']:.3f}", f"{r['after']:.3f}", "yes" if r["held"] else "NO") for r in table_rows]
    publish(
        f"Quickstart, {datetime.date.today()}, {platform.machine()} CPU, `bash benchmarks/acceptance.sh`.\n"
        f"Bounds: at most {MOST_BEFORE} before, at least {LEAST_AFTER} after; the control (advantages shuffled over "
        f"the batch) rises by at most {MOST_CONTROL_RISE}.\n\n"
        + table("run | held-out greedy accuracy before | after | bound held", cells),
        Path(sys.argv[2]),
    )
    return 0 if all(row["held"] for row in table_rows) else 1


if __name__ == "__main__":
    sys.exit(main())
