"""``slime-like score CHECKPOINT --input tokens.jsonl --output logprobs.jsonl``."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from slime_like.checks.check import check
from slime_like.checks.checkpoint_backend import backend_problem
from slime_like.checks.directories import directory_problem
from slime_like.checks.needs import RANKS, loading_needs
from slime_like.commands.arguments import has_flag, temporary_run_dir
from slime_like.commands.weights_source import WeightsSource, find_weights
from slime_like.config import RunConfig
from slime_like.config.reading.help import fields_help
from slime_like.config.reading.load import load_config
from slime_like.data.rows import SUFFIXES
from slime_like.errors import ConfigError

USAGE = "slime-like score CHECKPOINT --input TOKENS.jsonl --output LOGPROBS.jsonl [--section.field VALUE ...]"


def add_parser(subparsers: Any) -> None:
    """Add the command to what ``ArgumentParser.add_subparsers`` returned."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "score",
        help="per-token logprobs of given token sequences, under any parallel layout",
        usage=USAGE,
        description="Score every response token of the rows {id, prompt_tokens, response_tokens} (optionally with a\n"
        "temperature) and write {id, logprobs, entropy} in the same order. Trainer ranks do it, laid out as\n"
        "trainer.parallel says; no engine is started.",
        epilog="Of the configuration only model.*, trainer.*, cluster.*, logging.progress and run_dir matter here.\n\n"
        + fields_help(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "checkpoint",
        type=Path,
        metavar="CHECKPOINT",
        help="a Hugging Face directory, what `slime-like convert to-megatron` wrote, or a run's checkpoints/step-N; "
        "dimensions and model.dtype of the last are those of the run's config.yaml, unless --model.path and "
        "--model.dtype say otherwise",
    )
    _add_files(parser)


def _add_files(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--input", type=Path, required=True, metavar="FILE", help="token rows, .jsonl or .parquet")
    parser.add_argument("--output", type=Path, required=True, metavar="FILE", help="JSONL file to write")


def run(arguments: Sequence[str]) -> int:
    """Run ``slime-like score``."""
    if not arguments or arguments[0].startswith("--"):
        raise ConfigError([f"CHECKPOINT is missing; it comes first: {USAGE}"])
    parser = argparse.ArgumentParser(prog="slime-like score", usage=USAGE, add_help=False, allow_abbrev=False)
    _add_files(parser)
    files, flags = parser.parse_known_args(list(arguments[1:]))
    problems = _file_problems(files.input, files.output)
    if problems:
        raise ConfigError(problems)
    source = find_weights(Path(arguments[0]), flags)
    config = _checked(source, flags)
    from slime_like.score import ScoreRequest, score  # imports torch and Ray: only once the configuration is right

    temporary = not has_flag(flags, "run_dir")
    summary = score(config, ScoreRequest(files.input, files.output, source.weights, temporary))
    speed = summary.tokens / summary.wall_s
    print(f"scored: {summary.rows} sequences, {summary.tokens} tokens, {speed:.0f} tokens/s")
    print(f"mean logprob: {summary.mean_logprob:.4f}")
    print(f"output: {files.output}")
    return 0


def _file_problems(source: Path, output: Path) -> list[str]:
    problems = []
    if source.suffix not in SUFFIXES:
        problems.append(f"--input {source} is of an unknown type; give a {' or '.join(SUFFIXES)} file")
    elif not source.is_file():
        problems.append(f"--input {source} does not exist; give an existing file")
    if output.is_dir():
        problems.append(f"--output {output} is a directory; give a file")
    elif not output.absolute().parent.is_dir():
        problems.append(f"--output {output}: its directory does not exist; make it first")
    elif output.exists() and not output.is_file():
        problems.append(f"--output {output} is a device or a pipe, and would be replaced; give a file")
    elif source.is_file() and output.exists() and output.samefile(source):
        problems.append(f"--output {output} is the input; give another file")
    elif problem := directory_problem(output.resolve().parent):
        problems.append(f"--output {output}: its directory {problem}")
    return problems


def _checked(source: WeightsSource, flags: Sequence[str]) -> RunConfig:
    """The user's flags come last, so that they win."""
    config = load_config(None, ["--run_dir", str(temporary_run_dir("score")), *source.flags, *flags])
    problems = check(config, loading_needs(config, RANKS) if source.weights is None else RANKS)
    if source.weights is not None:
        problem = backend_problem(source.weights.parent, config.trainer.backend, "CHECKPOINT")
        problems += [] if problem is None else [problem]
    if problems:
        raise ConfigError(problems)
    return config
