"""The command ``python -m benchmarks.step``."""

import argparse
import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median

import torch

from benchmarks.report import heading, parser, publish, table
from benchmarks.step import trl_side
from benchmarks.step.workload import (
    NUM_PROMPTS,
    PARTS,
    SAMPLES_PER_PROMPT,
    Measurement,
    Workload,
    make_inputs,
    measure_ours,
)
from benchmarks.trainer.shapes import SHAPES

GOALS = {4: 2.0, 64: 0.65, 256: 0.35}
"""Maps the limit on new tokens to our goal for the ratio of our time to TRL's."""
_STEPS = {4: 24, 64: 14, 256: 9}
_WARMUP_STEPS = 4


@dataclass(frozen=True, slots=True)
class Comparison:
    """One workload, measured on both systems in turns: a pair of ours and TRL's per round, one right after the other.

    If the machine's speed drifts, compare seconds only within a round.
    """

    max_new_tokens: int
    rounds: Sequence[tuple[Measurement, Measurement]]

    @property
    def ratios(self) -> list[float]:
        """Our seconds per step divided by TRL's: we are faster below 1."""
        return [ours.step_s / trl.step_s for ours, trl in self.rounds]

    def median_of(self, figure: Callable[[Measurement], float], side: int = 0) -> float:
        """Return the median of one value of ours, or of TRL's if ``side`` is 1."""
        return median(figure(pair[side]) for pair in self.rounds)


def main() -> None:
    options = _parser().parse_args()
    if importlib.util.find_spec("trl") is None:
        sys.exit("error: TRL is not installed; run `bash benchmarks/step.sh`, which installs the tested version")
    head = heading()
    comparisons = _compare(options)
    explained = (
        f"{options.shape}, {options.prompts} prompts a step, {SAMPLES_PER_PROMPT} samples each. {options.rounds} "
        f"rounds: TRL runs, then ours; a run's figure is its median over the steps after the first {_WARMUP_STEPS}, "
        "and the table shows the median of the rounds. Ratio: ours over TRL's in the same round, which a drift of the "
        f"machine's speed does not change. Ours: {options.processes} {options.engine} engines and as many "
        "data-parallel ranks in turn; TRL: one process with all cores' threads."
    )
    publish(f"{head}\n{explained}\n\n{_render(comparisons)}", options.result)


def _parser() -> argparse.ArgumentParser:
    options = parser("Seconds of a step, next to TRL's.")
    add = options.add_argument
    add("--new-tokens", type=int, nargs="+", default=list(_STEPS), help="length limits to compare")
    add("--shape", choices=SHAPES, default="tiny", help="of the model")
    add("--prompts", type=int, default=NUM_PROMPTS, help="of a step")
    add("--steps", type=int, help="steps of each run; by default 24, 14 and 9 for 4, 64 and 256 tokens")
    add("--rounds", type=int, default=3, help="runs of each system, in turns; a drift hits both")
    add("--engine", default="transformers", help="our inference engine")
    cores = len(os.sched_getaffinity(0))
    add("--processes", type=int, default=min(2, cores), help="our engines, and our data-parallel ranks")
    add("--out", type=Path, default=Path("runs/step"), help="for model, runs and logs")
    return options


def _compare(options: argparse.Namespace) -> list[Comparison]:
    model, prompts = make_inputs(options.out / "model", options.shape)
    comparisons = []
    for limit in options.new_tokens:
        workload = Workload(
            model,
            prompts,
            limit,
            options.steps or _STEPS.get(limit, 20),
            _WARMUP_STEPS,
            prompts_per_step=options.prompts,
            engine=options.engine,
            processes=options.processes,
            device="cuda" if torch.cuda.is_available() else "cpu",
        )
        rounds = []
        for number in range(1, options.rounds + 1):
            directory = options.out / f"{limit}-tokens" / f"round-{number}"
            print(f"up to {limit} new tokens, round {number}", file=sys.stderr, flush=True)
            theirs = trl_side.measure(workload, directory)
            rounds.append((measure_ours(workload, directory), theirs))
        comparisons.append(Comparison(limit, rounds))
    return comparisons


def _render(comparisons: Sequence[Comparison]) -> str:
    """Return two Markdown tables: both systems' steps, and the phases of ours."""
    columns = "new tokens, up to | mean length, ours | TRL | step, ours (s) | TRL (s) | ratio | of rounds | goal | met"
    rows, parts = [], []
    for each in comparisons:
        goal, ratio = GOALS.get(each.max_new_tokens), median(each.ratios)
        lengths = [fmean(pair[side].response_length for pair in each.rounds) for side in (0, 1)]
        seconds = [each.median_of(lambda one: one.step_s, side) for side in (0, 1)]
        rows.append(
            [
                each.max_new_tokens,
                *(f"{length:.1f}" for length in lengths),
                *(f"{value:.3f}" for value in seconds),
                f"{ratio:.2f}",
                f"{min(each.ratios):.2f} to {max(each.ratios):.2f}",
                *(("-", "-") if goal is None else (f"{goal:.2f}", "yes" if ratio <= goal else "NO")),
            ]
        )
        phases = [each.median_of(lambda one, part=part: one.parts[part]) for part in PARTS]  # type: ignore[misc]
        parts.append([each.max_new_tokens, *(f"{value:.3f}" for value in phases)])
    phase_columns = f"new tokens, up to | {' (s) | '.join(PARTS)} (s)"
    return f"{table(columns, rows)}\n\n{table(phase_columns, parts)}"


if __name__ == "__main__":
    main()
