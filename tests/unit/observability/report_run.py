"""A run directory written by the logger, with text that looks like markup, and its report."""

import io
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console

from slime_like.config import LoggingConfig, RunConfig
from slime_like.config.reading.load import save_config
from slime_like.observability.metrics import MetricLogger
from slime_like.observability.names import update_metrics
from slime_like.observability.report.data import read_run
from slime_like.observability.report.report import print_summary, write_page
from slime_like.observability.tables import (
    HELD_OUT_TABLE,
    SAMPLE_TABLE,
    TOKEN_TABLE,
    HeldOutSample,
    held_out_rows,
    per_sample_rows,
    per_token_rows,
)
from slime_like.trajectory import ScoredTrajectory
from tests.unit.observability.records import RL_METRICS, grpo_stats

HOSTILE = (
    "<script>document.title='hacked'</script>",
    '"><img src=x onerror="document.title=\'hacked\'">',
    "</script><script>document.title='hacked'</script>",
    "<!--<script>",
    "</td></tr></table>'\"&lt;",
    "${1} [bold]{0}[/nope] %s",
    "\x1b[2J\x07\u202eesrever\u2028\ud800",
    "a\n  b\t<br>",
)
STEPS, TABLES_EVERY, SAMPLES, TOKENS = 30, 10, 4, 6
ACCURACIES = {0: 0.25, 15: 0.5, 30: 0.875}


def write_run(run_dir: Path) -> Path:
    """The loss falls from 1/1 to 1/30. Rewards, times and lengths come from ``RL_METRICS``."""
    run_dir.mkdir(parents=True)
    config = RunConfig.model_validate({"run_dir": run_dir, "steps": STEPS, "model": {"path": run_dir / "model"}})
    save_config(config, run_dir / "config.yaml")
    constant = {name: value for name, value in RL_METRICS.items() if not name.startswith("sources/")}
    logger = MetricLogger(LoggingConfig(tensorboard=False), run_dir)
    for step in range(STEPS + 1):
        if step:
            losses = {"loss": 1 / step, "policy_loss": 0.5 / step, "engine_gap_mean": 1e-6, "engine_gap_max": 1e-5}
            update = grpo_stats(**losses, ratios=1.0, entropy=2.0, grad_norm=0.5)
            logger.log(step, constant | update_metrics([update]))
        if step in ACCURACIES:
            figures = {"num_responses": 16, "response_length_mean": 5.0, "truncated_fraction": 0, "scoring_failures": 0}
            figures["accuracy"] = ACCURACIES[step]
            logger.log(step, {f"evaluation/{name}": value for name, value in figures.items()})
            held_out = [
                HeldOutSample("eval", i, [i], [step % 7, i], HOSTILE[i], step > i, "stop") for i in range(SAMPLES)
            ]
            logger.log_table(step, HELD_OUT_TABLE, held_out_rows(step, held_out, decode))
        if step and step % TABLES_EVERY == 0:
            rows = [sample(step, index) for index in range(SAMPLES)]
            logger.log_table(step, SAMPLE_TABLE, per_sample_rows(step, rows, grpo_stats(loss=1 / step), decode))
            logger.log_table(step, TOKEN_TABLE, per_token_rows(step, rows, decode))
    logger.close()
    return run_dir


def write_report(run_dir: Path, output: Path | None = None) -> Path:
    return write_page(read_run(run_dir), output)


def printed(run_dir: Path, width: int = 200) -> str:
    stream = io.StringIO()
    print_summary(read_run(run_dir), Console(file=stream, width=width, force_terminal=False))
    return stream.getvalue()


def sample(step: int, index: int) -> ScoredTrajectory:
    """Advantages 10, 9, 8, 7 at positions 0 to 3. The first has a reference; the last token of each has no loss."""
    generated = torch.linspace(-0.1, -3.0, TOKENS) + 10.0 ** (index - 5)
    return ScoredTrajectory(
        prompt_tokens=torch.tensor([index]),
        response_tokens=torch.arange(index, index + TOKENS) % len(HOSTILE),
        prompt_len=1,
        response_len=TOKENS,
        logprobs=generated,
        old_logprobs=torch.linspace(-0.1, -3.0, TOKENS),
        ref_logprobs=generated - 0.5 if index == 0 else None,
        rewards=torch.tensor([float(index % 2)]),
        advantages=torch.tensor(10.0 - index),
        successes=torch.tensor([float(index % 2)]),
        answer=HOSTILE[0],
        sequence_id=f"{step}-{index}<i>",
        group_id=step,
        reward_metadata={"func_names": ["<b>math</b>"], "<b>math</b>": {"found": HOSTILE[1]}},
        policy_version=step,
        loss_mask=torch.arange(TOKENS) < TOKENS - 1,
        weight_versions=torch.full((TOKENS,), step),
    )


def decode(tokens: Sequence[int]) -> str:
    return "".join(HOSTILE[token] for token in tokens)
