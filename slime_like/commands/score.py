"""``slime-like score CHECKPOINT --input tokens.jsonl --output logprobs.jsonl``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slime_like.commands.arguments import has_flag, temporary_run_dir
from slime_like.config import RunConfig
from slime_like.config.check import check_trainer
from slime_like.config.help import fields_help
from slime_like.config.load import load_config
from slime_like.data.rows import SUFFIXES
from slime_like.errors import ConfigError

USAGE = "slime-like score CHECKPOINT --input TOKENS.jsonl --output LOGPROBS.jsonl [--section.field VALUE ...]"


@dataclass(frozen=True, slots=True)
class WeightsSource:
    """Flags that name the model (dimensions and precision), and the training checkpoint with its weights, if any."""

    flags: tuple[str, ...]
    weights: Path | None


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
        help="a Hugging Face directory, or a run's checkpoints/step-N; dimensions and model.dtype of the latter are "
        "those of the run's config.yaml, unless --model.path and --model.dtype say otherwise",
    )
    _add_files(parser)


def _add_files(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--input", type=Path, required=True, metavar="FILE", help="token rows, .jsonl or .parquet")
    parser.add_argument("--output", type=Path, required=True, metavar="FILE", help="JSONL file to write")


def run(arguments: Sequence[str]) -> int:
    """Everything behind ``slime-like score``."""
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


def find_weights(checkpoint: Path, flags: Sequence[str]) -> WeightsSource:
    """What kind of checkpoint this is, and where its model's dimensions are.

    Raises:
        ConfigError: it is neither kind, or a training checkpoint whose model cannot be told.
    """
    if (checkpoint / "config.json").is_file():
        if has_flag(flags, "model.path"):
            raise ConfigError([f"--model.path: CHECKPOINT={checkpoint} is the model already; leave it out"])
        return WeightsSource(("--model.path", str(checkpoint)), None)
    weights = checkpoint / "trainer"
    if not (checkpoint / "state.json").is_file() or not weights.is_dir():
        raise ConfigError([f"CHECKPOINT={checkpoint} {_what_instead(checkpoint)}"])
    run_config = checkpoint.resolve().parent.parent / "config.yaml"
    if run_config.is_file():
        model = load_config(run_config).model
        return WeightsSource(("--model.path", str(model.path), "--model.dtype", model.dtype), weights.resolve())
    if not has_flag(flags, "model.path"):
        raise ConfigError(
            [
                f"CHECKPOINT={checkpoint}: a training checkpoint does not say its model's dimensions, and {run_config} "
                "does not exist; give --model.path, the Hugging Face directory that the run started from"
            ]
        )
    return WeightsSource((), weights.resolve())


def _what_instead(checkpoint: Path) -> str:
    if not checkpoint.is_dir():
        return "is no directory; give a Hugging Face directory or a run's checkpoints/step-N"
    if (checkpoint / "checkpoints").is_dir():
        return "is a run directory; give its hf/, or checkpoints/latest in it"
    return (
        "is neither a Hugging Face directory (no config.json) nor a training checkpoint (no state.json beside "
        "trainer/); give one of these"
    )


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
    elif source.is_file() and output.exists() and output.samefile(source):
        problems.append(f"--output {output} is the input; give another file")
    return problems


def _checked(source: WeightsSource, flags: Sequence[str]) -> RunConfig:
    """The user's flags come last, so that they win."""
    config = load_config(None, ["--run_dir", str(temporary_run_dir("score")), *source.flags, *flags])
    problems = check_trainer(config)
    if problems:
        raise ConfigError(problems)
    return config
