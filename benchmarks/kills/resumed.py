"""Check that a run that is killed at random moments ends like an undisturbed one.

The same configuration runs twice: once undisturbed, and once killed repeatedly with SIGKILL at random moments and
started again each time. About three of ten kills hit the start-up, the others steps and checkpoints; uniformly random
moments would rarely hit anything but the start-up, which takes as long as many steps. Every sampled token id must be
the same, and the figures of every step equal within 1e-6. Nothing of a killed run may keep running.
"""

import datetime
import random
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from slime_like.data.dump import dump_path, load_trajectories
from slime_like.observability.metrics import METRICS_FILE, read_metrics
from slime_like.observability.names import LOSS
from tests.support.processes import Command

FIGURES = ("loss", "policy_loss", "kl_loss", "ratios", "entropy", "grad_norm", "num_tokens")
TOLERANCE = 1e-6
RUN_TIMEOUT_S = 1200.0
_FIRST_STEP = "| step time "
_SHARE_IN_START = 0.3


@dataclass(frozen=True)
class Outcome:
    """The result of the comparison.

    Attributes:
        steps, tokens: numbers of compared steps and tokens.
        finished_steps: step of the last checkpoint at every kill.
        largest_gap: largest difference of any figure of any step.
    """

    steps: int
    tokens: int
    finished_steps: list[int]
    largest_gap: float


def flags(root: Path, model: Path, steps: int, engine: str) -> list[str]:
    return [
        "train", "configs/quickstart.yaml",
        "--run_dir", str(root / "run"),
        "--model.path", str(model),
        "--data.train", str(model / "data" / "train.jsonl"),
        "--evaluation.files", "[]",
        "--evaluation.every", "0",
        "--steps", str(steps),
        "--rollout.engine", engine,
        "--rollout.prompts_per_step", "8",
        "--rollout.samples_per_prompt", "4",
        "--algorithm.kl.coef", "0.01",
        "--reward.functions", "[{name: math_verify}, {name: format, options: {pattern: '.*[a-m].*'}}]",
        "--checkpoint.every", "10",
        "--checkpoint.export_hf", "false",
        "--debug.save_rollouts", str(root / "rollouts"),
        "--logging.progress", "plain",
    ]  # fmt: skip


def undisturbed(arguments: list[str], root: Path) -> tuple[float, float]:
    """Return seconds until the end of the first step, and from there to the end."""
    started = time.monotonic()
    with Command(arguments, root / "log", forked=False) as command:
        command.wait_for(_FIRST_STEP, RUN_TIMEOUT_S)
        first_step = time.monotonic()
        finished = command.finish(RUN_TIMEOUT_S)
    if finished.code != 0:
        sys.exit(f"the undisturbed run failed: {finished.stderr}")
    return first_step - started, time.monotonic() - first_step


def disturbed(
    arguments: list[str], root: Path, kills: int, start_s: float, training_s: float, generator: random.Random
) -> list[int]:
    """Kill and start again ``kills`` times, then let it end; return the finished steps at each kill."""
    finished_steps = []
    for attempt in range(kills):
        in_start = generator.random() < _SHARE_IN_START
        with Command(arguments, root / f"log-{attempt}", forked=False) as command:
            if not in_start:
                command.wait_for(_FIRST_STEP, RUN_TIMEOUT_S)
            time.sleep(generator.uniform(0.5, start_s) if in_start else generator.uniform(0, training_s / kills))
            if command.process.poll() is not None:
                sys.exit(f"attempt {attempt} ended before it was killed: {command.output}; take more steps")
            command.kill()
            left = command.finish(timeout_s=30).left_behind
        if left:
            sys.exit(f"attempt {attempt} left processes behind: {left}")
        latest = root / "run" / "checkpoints" / "latest"
        finished_steps.append(int(latest.resolve().name.removeprefix("step-")) if latest.is_symlink() else 0)
        print(f"kill {attempt + 1}: checkpoint of step {finished_steps[-1]} is whole", flush=True)
    undisturbed(arguments, root)
    return finished_steps


def compare(ours: Path, theirs: Path, steps: int, finished_steps: list[int]) -> Outcome:
    """Check that token ids are equal and figures agree."""
    tokens, largest = 0, 0.0
    for step, (difference, count, gap) in enumerate(differences(ours, theirs, range(1, steps + 1)), start=1):
        if difference:
            sys.exit(f"step {step}: {difference}")
        tokens, largest = tokens + count, max(largest, gap)
    return Outcome(steps, tokens, finished_steps, largest)


def differences(ours: Path, theirs: Path, steps: range) -> Iterator[tuple[str, int, float]]:
    """Yield for each step where token ids differ, how many were compared, and the largest gap of any figure."""
    rows = [
        {row["step"]: row for row in read_metrics(root / "run" / METRICS_FILE) if LOSS in row}
        for root in (ours, theirs)
    ]
    for step in steps:
        mine, other = (load_trajectories(dump_path(root / "rollouts", step)) for root in (ours, theirs))
        difference, tokens = "", 0
        for a, b in zip(mine, other, strict=True):
            if a.sequence_id != b.sequence_id or not torch.equal(a.response_tokens, b.response_tokens):
                difference = f"sequence {a.sequence_id} differs from {b.sequence_id} of the undisturbed run"
            tokens += a.response_len
        keys = [f"train_actor_training/{name}" for name in FIGURES]
        yield difference, tokens, max(abs(rows[0][step][key] - rows[1][step][key]) for key in keys)


def render(outcome: Outcome, engine: str, seed: int) -> str:
    return (
        f"Killed and resumed, {datetime.date.today()}, engine {engine}, seed of the moments {seed}, "
        "`python -m benchmarks.kills`.\n\n"
        f"- SIGKILL at {len(outcome.finished_steps)} random moments; last whole checkpoint at each: "
        f"{', '.join(map(str, outcome.finished_steps))}.\n"
        f"- {outcome.tokens} sampled token ids over {outcome.steps} steps: equal to those of the undisturbed run.\n"
        f"- Largest difference of any figure of any step: {outcome.largest_gap:.1e} (bound {TOLERANCE:.0e}).\n"
    )
