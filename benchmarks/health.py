"""Check that sound runs raise no alarm, and that faults do: ``python -m benchmarks.health [--result FILE]``.

Three sound runs of 100 steps: the quickstart, the calculator, and the quickstart with sampling ahead. Then runs with a
fault from their start or in their middle, each with the rules that it must raise. Exit code 1 if one does otherwise.
"""

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.report import flags, heading, met, parser, publish, run_to_its_end, steady_steps, table
from slime_like.observability.health import EVENTS_FILE
from slime_like.observability.metrics import read_lines
from slime_like.observability.names import STEP_TIME

REPO = Path(__file__).parents[1]
_SLIME = [sys.executable, "-m", "slime_like.commands.main"]
_AHEAD = {"rollout.max_staleness": 2, "algorithm.importance.correction": "truncate"}
_GROWING = {"trainer.optimizer.lr": 0.02, "trainer.optimizer.warmup_steps": 110}


def _reward(name: str, **options: object) -> dict[str, object]:
    settings = ", ".join(f"{option}: {value}" for option, value in options.items())
    return {"reward.functions": f"[{{name: '{REPO}/tests/faults/rewards.py:{name}', options: {{{settings}}}}}]"}


@dataclass(frozen=True)
class Case:
    """A run and the rules that it must raise: exactly none, or at least these."""

    raises: frozenset[str] = frozenset()
    steps: int = 100
    recipe: str = "quickstart"
    settings: Mapping[str, object] = field(default_factory=dict)


CASES = {
    "quickstart": Case(settings={"rollout.engine": "vllm"}),
    "calculator": Case(recipe="calculator"),
    "ahead": Case(settings=_AHEAD),
    "constant reward": Case(frozenset({"no_gradient"}), 8, settings=_reward("always_one")),
    "failing reward": Case(frozenset({"failed_samples"}), 8, settings=_reward("fails_often")),
    "slow reward": Case(frozenset({"slow_phase"}), 40, settings=_reward("slows_down", quick_calls=2500, seconds=0.05)),
    "slow reward ahead": Case(
        frozenset({"idle_trainers"}),
        12,
        settings={
            **_AHEAD,
            **_reward("slows_down", quick_calls=0, seconds=0.3),
            "rollout.prompts_per_step": 16,
            "health.idle_trainers": 80,
        },
    ),
    "growing learning rate": Case(frozenset({"entropy_cliff", "truncated", "no_gradient"}), 60, settings=_GROWING),
    "growing learning rate, long responses": Case(
        frozenset({"repeated_text", "truncated"}), 60, settings={**_GROWING, "rollout.max_new_tokens": 96}
    ),
}


def raised(run_dir: Path) -> dict[str, str]:
    """Return the rules that a run raised, each with its first step and severity."""
    path, found = run_dir / EVENTS_FILE, dict[str, str]()
    for _, row in read_lines(path) if path.is_file() else ():
        if row["severity"] != "cleared":
            found.setdefault(row["rule"], f"{row['rule']} ({row['severity']} at step {row['step']})")
    return found


def run(out: Path, name: str, case: Case) -> tuple[object, ...]:
    """Train and return a row of the table."""
    base, run_dir = out / case.recipe, out / "runs" / name.replace(" ", "-")
    data = base / "model" / "data" / ("calculator" if case.recipe == "calculator" else "")
    settings = {
        "run_dir": run_dir,
        "resume": "never",
        "steps": case.steps,
        "model.path": base / "warm_start" / "hf",
        "data.train": data / "train.jsonl",
        "evaluation.files": data / "eval.jsonl",
        "rollout.engine": "transformers",
        "trainer.cpu_threads": 1,
        "logging.tensorboard": "false",
        **case.settings,
    }
    run_to_its_end([*_SLIME, "train", f"configs/{case.recipe}.yaml", *flags(settings)], out / f"{name}.log", cwd=REPO)
    found = raised(run_dir)
    holds = found.keys() >= case.raises if case.raises else not found
    seconds = sorted(row[STEP_TIME] for row in steady_steps(run_dir, 1))
    expected = ", ".join(sorted(case.raises)) or "none"
    return name, case.steps, f"{seconds[len(seconds) // 2]:.2f}", expected, "; ".join(found.values()), met(holds)


def prepare(out: Path, recipe: str) -> None:
    """Make the recipe's model, data and supervised start, unless they are there."""
    base = out / recipe
    if (base / "warm_start" / "hf").is_dir():
        return
    run_to_its_end([*_SLIME, "make-tiny-model", str(base / "model"), "--force"], out / f"{recipe}-model.log", cwd=REPO)
    data = base / "model" / "data" / ("calculator" if recipe == "calculator" else "")
    settings: dict[str, object] = {"run_dir": base / "warm_start", "model.path": base / "model"}
    settings |= {"data.train": data / "sft.jsonl", "resume": "never", "trainer.cpu_threads": 1}
    command = [*_SLIME, "train", f"configs/{recipe}_warm_start.yaml", *flags(settings)]
    run_to_its_end(command, out / f"{recipe}-start.log", cwd=REPO)


def main() -> int:
    arguments = parser(__doc__)
    arguments.add_argument("--only", nargs="+", choices=CASES, default=list(CASES), help="runs")
    arguments.add_argument("--out", type=Path, default=Path("runs/health"))
    options = arguments.parse_args()
    head, out, rows = heading(), options.out.absolute(), []
    for name in options.only:
        prepare(out, CASES[name].recipe)
        rows.append(run(out, name, CASES[name]))
        print(*rows[-1], sep=" | ", flush=True)
    publish(f"{head}\n\n{table('run | steps | step (s) | must raise | raised | goal', rows)}", options.result)
    return 0 if all(row[-1] == met(True) for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
