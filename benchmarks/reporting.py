"""Measure time and memory of ``slime-like report`` for a long run: ``python -m benchmarks.reporting OUT_DIR RESULT``.

The run has 10,000 steps with changing metrics, debug tables at every tenth step (the default), and five million events
in its ledger. Each command runs in a separate process, imports included. The fastest of three runs is reported, because
others may use the machine. Exit code 1 if a bound does not hold.
"""

import argparse
import datetime
import os
import random
import subprocess
import sys
import time
from contextlib import closing
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # `report` is measured with its imports in a separate process
    from slime_like.observability.metrics import MetricLogger

BOUND_S, BOUND_MB = 10.0, 500.0
REPEATS = 3
TABLES_EVERY = 10
SAMPLES, TOKENS = 4, 500
GROUPS_PER_STEP = 125
STEPS = 10_000
"""Steps of ``GROUPS_PER_STEP`` groups with four events each: 5 million events."""


@dataclass(frozen=True)
class Row:
    """One command: its exit code, last line, wall and processor seconds, and peak resident memory in MB."""

    command: list[str]
    code: int
    last_line: str
    wall_s: float
    cpu_s: float
    memory_mb: float

    @property
    def held(self) -> bool:
        return self.code == 0 and self.wall_s < BOUND_S and self.memory_mb < BOUND_MB


def write_run(run_dir: Path, steps: int) -> None:
    """Write metrics, tables and ledger with the code that writes them in a run."""
    from slime_like.config import LoggingConfig, RunConfig
    from slime_like.config.reading.load import save_config
    from slime_like.data.ledger import GENERATED, ISSUED, SCORED, TRAINED, Ledger
    from slime_like.observability.metrics import MetricLogger
    from slime_like.observability.names import ACCURACY, step_metrics
    from tests.unit.observability.records import rl_record

    draw = random.Random(0)
    config = RunConfig.model_validate({"run_dir": run_dir, "steps": steps, "model": {"path": run_dir / "model"}})
    run_dir.mkdir(parents=True)
    save_config(config, run_dir / "config.yaml")
    metrics = step_metrics(rl_record())
    with closing(MetricLogger(LoggingConfig(tensorboard=False), run_dir)) as logger:
        for step in range(1, steps + 1):
            logger.log(step, {name: (1 + abs(value)) * draw.random() for name, value in metrics.items()})
            if step % TABLES_EVERY == 0:
                log_tables(logger, step, draw)
                logger.log(step, {ACCURACY: draw.random()})
    with closing(Ledger.begin(run_dir)) as ledger:
        for step in range(1, steps + 1):
            groups = range((step - 1) * GROUPS_PER_STEP, step * GROUPS_PER_STEP)
            ledger.add(groups, ISSUED, version=step - 1)
            ledger.add(groups, GENERATED, version=step - 1)
            ledger.add(groups, SCORED)
            ledger.add(groups, TRAINED, step=step)


def log_tables(logger: "MetricLogger", step: int, draw: random.Random) -> None:
    """Log ``SAMPLES`` samples of ``TOKENS`` tokens with scores of a reference and an engine."""
    import torch

    from slime_like.observability.tables import SAMPLE_TABLE, TOKEN_TABLE, per_sample_rows, per_token_rows
    from tests.unit.observability.records import grpo_stats
    from tests.unit.observability.report_run import sample

    logprobs = torch.linspace(-0.1, -3.0, TOKENS) * (1 + draw.random())
    samples = [
        replace(
            sample(step, index),
            response_tokens=torch.randint(0, 50_000, (TOKENS,)),
            response_len=TOKENS,
            logprobs=logprobs,
            old_logprobs=torch.linspace(-0.1, -3.0, TOKENS),
            advantages=torch.tensor(1.0),
            ref_logprobs=logprobs - 0.5,
            loss_mask=torch.ones(TOKENS, dtype=torch.bool),
            weight_versions=torch.full((TOKENS,), step),
        )
        for index in range(SAMPLES)
    ]
    logger.log_table(step, SAMPLE_TABLE, per_sample_rows(step, samples, grpo_stats(), _decode))
    logger.log_table(step, TOKEN_TABLE, per_token_rows(step, samples, _decode))


def _decode(tokens: object) -> str:
    return "".join(f" w{token}" for token in tokens)  # type: ignore[attr-defined]


def measure(run_dir: Path, *flags: str) -> Row:
    command = ["report", str(run_dir), *flags]
    began = time.monotonic()
    with subprocess.Popen(
        [str(Path(sys.executable).with_name("slime-like")), *command], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        output = process.stdout.read()
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    wall_s = time.monotonic() - began
    print(output)
    last = (output.strip().splitlines() or [""])[-1]
    return Row(command, process.returncode, last, wall_s, used.ru_utime + used.ru_stime, used.ru_maxrss / 1000)


def fastest(run_dir: Path, *flags: str) -> Row:
    return min((measure(run_dir, *flags) for _ in range(REPEATS)), key=lambda row: row.wall_s)


def render(rows: list[Row], run_dir: Path, steps: int) -> str:
    sizes = {file.name: file.stat().st_size / 1e6 for file in sorted(run_dir.rglob("*")) if file.suffix != ".html"}
    shown = ", ".join(f"`{name}` {size:,.0f} MB" for name, size in sizes.items() if size >= 1)
    lines = [
        f"`slime-like report` of {steps:,} steps and {4 * GROUPS_PER_STEP * steps:,} events, {datetime.date.today()},",
        f"`python -m benchmarks.reporting`. Bounds: {BOUND_S:g} s and {BOUND_MB:g} MB. The run: {shown}.",
        f"Fastest of {REPEATS}; load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores.",
        f"The page has {(run_dir / 'report.html').stat().st_size / 1e6:.1f} MB.",
        "",
        "| command | exit code | wall, s | processor, s | memory, MB | held |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        shown = " ".join(["slime-like", *row.command]).replace(str(run_dir), "RUN_DIR")
        figures = f"{row.code} | {row.wall_s:.1f} | {row.cpu_s:.1f} | {row.memory_mb:.0f}"
        lines.append(f"| `{shown}` | {figures} | {'yes' if row.held else 'NO'} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.reporting", description=__doc__)
    parser.add_argument("out", type=Path, help="directory for the run; one that is there is measured again")
    parser.add_argument("result", type=Path, help="Markdown file to write")
    parser.add_argument("--steps", type=int, default=STEPS)
    options = parser.parse_args()
    run_dir = options.out / f"steps-{options.steps}"
    if not run_dir.exists():  # in another process, because memory of this one would count for the commands
        writer = get_context("spawn").Process(target=write_run, args=(run_dir, options.steps))
        writer.start()
        writer.join()
        if writer.exitcode != 0:
            sys.exit(f"the run could not be written (exit code {writer.exitcode})")
    rows = [fastest(run_dir), fastest(run_dir, "--audit")]
    text = render(rows, run_dir, options.steps)
    options.result.write_text(text, encoding="utf-8")
    print(text)
    return 0 if all(row.held for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
