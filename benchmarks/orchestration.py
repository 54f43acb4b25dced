"""Report the share of orchestration in a run's step time: ``python -m benchmarks.orchestration RUN_DIR``."""

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slime_like.errors import DataError, SlimeLikeError
from slime_like.observability.metrics import METRICS_FILE, read_metrics
from slime_like.observability.names import STEP_TIME, phase_seconds
from slime_like.observability.phases import PHASES

WARMUP_STEPS = 5


@dataclass(frozen=True, slots=True)
class PhaseReport:
    """Means over the steady steps of a run.

    Attributes:
        num_steps: steps averaged.
        step_s: mean step time, seconds.
        seconds: mean seconds of every phase, "orchestration" last; they add up to ``step_s``.
    """

    num_steps: int
    step_s: float
    seconds: dict[str, float]

    def share(self, phase: str) -> float:
        """Return the phase's percentage of step time."""
        return 100 * self.seconds[phase] / self.step_s


def phase_report(metrics_path: Path, skip: int = WARMUP_STEPS) -> PhaseReport:
    """Average the phases of all steps but the first ``skip``, which compile, allocate and fill caches.

    Raises:
        DataError: no step is left, or a step lacks a phase.
    """
    by_step = {record["step"]: record for record in read_metrics(metrics_path) if STEP_TIME in record}
    steady = [by_step[step] for step in sorted(by_step)[skip:]]
    if not steady:
        problem = f"{len(by_step)} training steps and {skip} skipped leave none"
        raise DataError(problem, code="too-few-steps", who=str(metrics_path), remedy="run more steps")
    names = {phase: phase_seconds(phase) for phase in (*PHASES, "orchestration")}
    seconds = {phase: _mean(steady, name, metrics_path) for phase, name in names.items()}
    return PhaseReport(len(steady), _mean(steady, STEP_TIME, metrics_path), seconds)


def format_report(report: PhaseReport) -> str:
    """Format the report as a table of text."""
    lines = [f"{'phase':<15}{'mean seconds':>14}{'share':>9}"]
    lines += [f"{phase:<15}{value:>14.4f}{report.share(phase):>8.2f}%" for phase, value in report.seconds.items()]
    lines.append(f"{'step':<15}{report.step_s:>14.4f}{100:>8.2f}%")
    share = report.share("orchestration")
    lines.append(f"orchestration takes {share:.2f}% of step time, over {report.num_steps} steady steps")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.orchestration", description=__doc__)
    parser.add_argument("run_dir", type=Path, help="directory of a finished or running training run")
    parser.add_argument(
        "--skip", type=int, default=WARMUP_STEPS, help="first steps to leave out (default: %(default)s)"
    )
    options = parser.parse_args(arguments)
    try:
        print(format_report(phase_report(options.run_dir / METRICS_FILE, options.skip)))
    except SlimeLikeError as error:
        sys.exit(f"error: {error}")


def _mean(records: Sequence[Mapping[str, Any]], name: str, path: Path) -> float:
    missing = [record["step"] for record in records if record.get(name) is None]
    if missing:
        problem, remedy = f"step {missing[0]} has no {name}", "only runs that record every phase can be averaged"
        raise DataError(problem, code="figure-missing", who=str(path), remedy=remedy)
    return sum(record[name] for record in records) / len(records)


if __name__ == "__main__":
    main()
