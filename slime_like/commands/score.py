"""``slime-like score CHECKPOINT --input tokens.jsonl --output logprobs.jsonl``."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from slime_like.checks.definition import RANKS, loading_needs
from slime_like.checks.earlier_run import checkpoint_problem
from slime_like.commands.command import Command, find_weights, has_flag, option, output_problem, temporary_run_dir
from slime_like.commands.reference import fields_help
from slime_like.config import RunConfig
from slime_like.config.reading.load import load_config
from slime_like.errors import ConfigError, Problem
from slime_like.system.words import counted


def _run(files: argparse.Namespace, flags: list[str]) -> int:
    if problem := output_problem(files.output, {"--input": [files.input]}):
        raise ConfigError(problem, code="file-unusable")
    model, weights = find_weights(files.checkpoint, flags)
    config = _checked([*model, *flags], weights)
    from slime_like.score import score  # imports torch and Ray, so only after the checks

    temporary = not has_flag(flags, "run_dir")
    summary = score(config, files.input, files.output, weights, temporary)
    speed = summary.tokens / summary.wall_s
    print(f"scored: {counted(summary.rows, 'sequence')}, {counted(summary.tokens, 'token')}, {speed:.0f} tokens/s")
    print(f"mean logprob: {summary.mean_logprob:.4f}")
    print(f"output: {files.output}")
    return 0


def _checked(flags: Sequence[str], weights: Path | None) -> RunConfig:
    from slime_like.checks.check import check

    config = load_config(None, flags, temporary_run_dir("score"))
    loads = weights is None or config.model.lora.is_set
    problems = check(config, loading_needs(config.model, RANKS) if loads else RANKS)
    if weights is not None:
        problem = checkpoint_problem(weights.parent, config.model, config.trainer.backend, "CHECKPOINT")
        problems += [] if problem is None else [Problem("model.weights", problem)]
    if problems:
        raise ConfigError(problems)
    return config


COMMAND = Command(
    "score",
    "compute per-token logprobs of given sequences, under any parallel layout",
    _run,
    "Score every response token of the rows {id, prompt_tokens, response_tokens} (optionally with a\n"
    "temperature) and write {id, logprobs, entropy} in the same order. This starts trainer ranks in the\n"
    "layout trainer.parallel, but no engine.",
    (
        option("--input", type=Path, required=True, metavar="FILE", help="token rows, .jsonl or .parquet"),
        option("--output", type=Path, required=True, metavar="FILE", help="JSONL file to write"),
    ),
    "--input TOKENS.jsonl --output LOGPROBS.jsonl [--section.field VALUE ...]",
    {
        "CHECKPOINT": "a Hugging Face directory, output of `slime-like convert to-megatron`, or a run's "
        "checkpoints/step-N. The run's config.yaml gives dimensions and dtype; --model.path and --model.dtype "
        "override it"
    },
    epilog=lambda: "Only model.*, trainer.*, cluster.*, logging.progress and run_dir are used.\n\n" + fields_help(),
)
