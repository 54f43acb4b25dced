"""Print the key figures of a run: ``python -m benchmarks.first_light.run_figures RUN_DIR``."""

import sys
from collections import defaultdict
from pathlib import Path
from statistics import median

from slime_like.observability.metrics import read_metrics
from slime_like.observability.names import ACCURACY, ROLLOUT_SPEED, STEP_TIME, phase_seconds
from slime_like.observability.timing import PHASES

_TRAINING = "train_actor_training/"
_LISTED = {
    "loss": _TRAINING + "loss",
    "grad norm": _TRAINING + "grad_norm",
    "engine gap, mean": _TRAINING + "engine_gap_mean",
    "old gap, max": _TRAINING + "old_gap_max",
    "probe gap": "weights/probe_gap",
    "accuracy": ACCURACY,
    "trainer's memory, GiB": "train_actor_performance/memory/peak_gpu (GiB)",
    "trainer's host memory, GiB": "train_actor_performance/memory/peak_rss (GiB)",
}
"""Metrics that are shown with their first, last and largest value."""
_TIMED = {
    "step": STEP_TIME,
    **{name: phase_seconds(name) for name in (*PHASES, "orchestration")},
    "whole sync": "weights/sync (s)",
    "of it verification": "weights/verification (s)",
}


def main() -> None:
    """Print the figures; medians leave out the first step, which is a warm-up."""
    run_dir = Path(sys.argv[1])
    columns = defaultdict[str, list[float]](list)
    metrics = run_dir / "metrics.jsonl"
    for record in read_metrics(metrics) if metrics.exists() else ():
        for name, value in record.items():
            columns[name].append(value)
    if not columns[STEP_TIME]:
        sys.exit("figures: no step ended")
    print(f"figures: {len(columns[STEP_TIME])} steps; {_medians(columns)}")
    if speeds := columns[ROLLOUT_SPEED]:
        print(f"figures: rollout {median(speeds[1:] or speeds):,.0f} tokens/s")
    for shown, name in _LISTED.items():
        if found := columns[name]:
            print(f"figures: {shown} {found[0]:.3g} to {found[-1]:.3g}, at most {max(found):.3g}")
    memory = run_dir.with_name(run_dir.name + ".memory")
    if memory.exists():
        print(f"figures: memory by process, MiB: {_memory(memory)}")


def _medians(columns: dict[str, list[float]]) -> str:
    shown = {name: columns[column][1:] or columns[column] for name, column in _TIMED.items() if column in columns}
    return ", ".join(f"{name} {median(values):.3g} s" for name, values in shown.items() if max(values) > 0)


def _memory(samples: Path) -> str:
    """Return minimum (asleep), median and maximum for each process that used a GiB, in order of their starts."""
    of = defaultdict[str, list[int]](list)
    for line in samples.read_text().splitlines():
        process, _, used = line.partition(", ")
        if used.isdigit():
            of[process].append(int(used))
    # Skip the first samples of a process: it is still starting.
    settled = [used[len(used) // 4 :] for used in of.values() if max(used) >= 1024]
    return "; ".join(f"{min(used)}, {median(used):.0f}, {max(used)}" for used in settled) or "no process seen"


if __name__ == "__main__":
    main()
