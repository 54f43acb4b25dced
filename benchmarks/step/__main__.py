"""The command ``python -m benchmarks.step``."""

import argparse
import datetime
import importlib.util
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.step import ours, trl_side
from benchmarks.step.machine import describe_machine, load_average
from benchmarks.step.table import Comparison, Round, render
from benchmarks.step.workload import NUM_PROMPTS, SAMPLES_PER_PROMPT, Workload, make_inputs
from benchmarks.trainer.shapes import SHAPES
from slime_like.errors import SlimeLikeError

_STEPS = {4: 24, 64: 14, 256: 9}
_WARMUP_STEPS = 4


def main(arguments: Sequence[str] | None = None) -> None:
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.rounds < 1:
        parser.error(f"--rounds {options.rounds} measures nothing; give 1 or more")
    if importlib.util.find_spec("trl") is None:
        sys.exit(
            "error: TRL is not installed; run `bash benchmarks/step.sh`, which installs the tested version, or "
            "`pip install --no-deps -r <(grep '# bench$' constraints.txt)`"
        )
    try:
        load = load_average()
        report = _report(_compare(options), options, load, arguments)
    except SlimeLikeError as error:
        sys.exit(f"error: {error}")
    print(report)
    if options.result:
        options.result.write_text(f"{report}\n", encoding="utf-8")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.step", description="Seconds of a step, next to TRL's.")
    parser.add_argument(
        "--new-tokens",
        type=int,
        nargs="+",
        default=list(_STEPS),
        help="length limits to compare (default: %(default)s)",
    )
    parser.add_argument("--shape", choices=SHAPES, default="tiny", help="of the model (default: %(default)s)")
    parser.add_argument("--prompts", type=int, default=NUM_PROMPTS, help="of a step (default: %(default)s)")
    parser.add_argument("--steps", type=int, help="steps of each run (default: 24, 14 and 9 for 4, 64 and 256 tokens)")
    parser.add_argument(
        "--rounds", type=int, default=3, help="runs of each system, in turns (default: %(default)s); a drift hits both"
    )
    parser.add_argument("--engine", default="transformers", help="our inference engine (default: %(default)s)")
    parser.add_argument(
        "--processes",
        type=int,
        default=min(2, len(os.sched_getaffinity(0))),
        help="our engines, and our data-parallel ranks (default: one a core, at most 2)",
    )
    parser.add_argument(
        "--out", type=Path, default=Path("runs/step"), help="for model, runs and logs (default: %(default)s)"
    )
    parser.add_argument("--result", type=Path, help="also write the report to this file")
    return parser


def _compare(options: argparse.Namespace) -> list[Comparison]:
    model, prompts = make_inputs(options.out / "model", options.shape)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    comparisons = []
    for limit in options.new_tokens:
        steps = options.steps or _STEPS.get(limit, 20)
        workload = Workload(
            model,
            prompts,
            limit,
            steps,
            _WARMUP_STEPS,
            prompts_per_step=options.prompts,
            engine=options.engine,
            processes=options.processes,
            device=device,
        )
        directory = options.out / f"{limit}-tokens"
        rounds = [_round(workload, directory / f"round-{number}") for number in range(1, options.rounds + 1)]
        comparisons.append(Comparison(limit, rounds))
    return comparisons


def _round(workload: Workload, directory: Path) -> Round:
    print(f"up to {workload.max_new_tokens} new tokens, {directory.name}: TRL", file=sys.stderr, flush=True)
    theirs = trl_side.measure(workload, directory)
    print(f"up to {workload.max_new_tokens} new tokens, {directory.name}: slime-like", file=sys.stderr, flush=True)
    return Round(ours.measure(workload, directory), theirs)


def _report(
    comparisons: Sequence[Comparison], options: argparse.Namespace, load: float, arguments: Sequence[str] | None
) -> str:
    command = " ".join(["python -m benchmarks.step", *(sys.argv[1:] if arguments is None else arguments)])
    return (
        f"{datetime.date.today()}, {describe_machine()}, load average {load:.1f} at the start, `{command}`.\n"
        f"{options.shape}, {options.prompts} prompts a step, {SAMPLES_PER_PROMPT} samples each. {options.rounds} "
        f"rounds: TRL runs, then ours; a run's figure is its median over the steps after the first {_WARMUP_STEPS}, "
        "and what is shown the median of the rounds. Ratio: ours over TRL's in the same round, so that it stays what "
        "it is where the machine's speed drifts from round to round. "
        f"Ours: {options.processes} {options.engine} engines and as many data-parallel ranks in turn; TRL: one process "
        "with all cores' threads.\n\n"
        f"{render(comparisons)}"
    )


if __name__ == "__main__":
    main()
