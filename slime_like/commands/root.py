"""Subcommands of ``slime-like``: arguments and entry points."""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from slime_like import __version__
from slime_like.checks.check import require_valid
from slime_like.checks.directories import directory_problem
from slime_like.checks.engine_install import version_warning
from slime_like.checks.files import with_problems_of_files
from slime_like.checks.needs import NeedsOf, evaluation_needs, training_needs
from slime_like.commands import convert as convert_command
from slime_like.commands import launch as launch_command
from slime_like.commands import plan as plan_command
from slime_like.commands import report
from slime_like.commands import score as score_command
from slime_like.commands import verify as verify_command
from slime_like.commands.arguments import given_path, temporary_run_dir
from slime_like.commands.failure import traceback_kept
from slime_like.config.reading.help import fields_help
from slime_like.config.reading.load import load_config
from slime_like.config.run import MAX_SEED
from slime_like.errors import ConfigError
from slime_like.system.interrupts import InterruptHandler
from slime_like.system.memory import permanent_allocations

if TYPE_CHECKING:
    from slime_like.config import RunConfig
    from slime_like.orchestration.run.summary import TrainSummary

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "deepseek_v3")
"""Families ``make-tiny-model`` offers; listed here so that ``--help`` need not import torch."""


def run(argv: list[str]) -> int:
    """Run the subcommand that the arguments name; its exit code. Errors meant for people are ``SlimeLikeError``s."""
    if argv[:1] in (["train"], ["eval"]) and not {"-h", "--help"} & set(argv):
        # The flags take any number of values, so only the first argument can be the file.
        has_file = len(argv) > 1 and not argv[1].startswith("--")
        path, flags = (Path(argv[1]), argv[2:]) if has_file else (None, argv[1:])
        return _train(path, flags) if argv[0] == "train" else _evaluate(path, flags)
    if argv[:1] == ["launch"] and not {"-h", "--help"} & set(argv):
        InterruptHandler().install()
        return launch_command.run(argv[1:])
    if argv[:1] == ["plan"] and not {"-h", "--help"} & set(argv):
        InterruptHandler().install()
        return plan_command.run(argv[1:])
    if argv[:1] == ["score"] and not {"-h", "--help"} & set(argv):
        InterruptHandler().install()
        return score_command.run(argv[1:])
    if argv[:2] == ["verify", "layouts"] and not {"-h", "--help"} & set(argv):
        InterruptHandler().install()
        return verify_command.run(argv[2:])
    if argv[:1] == ["convert"] and argv[1:2] and argv[1] in convert_command.USAGES and not {"-h", "--help"} & set(argv):
        InterruptHandler().install()
        return convert_command.run(argv[1:])
    arguments = _parser().parse_args(argv)
    if arguments.command == "report":
        return report.run(arguments)
    return _make_tiny_model(arguments.out, arguments.family, arguments.seed, arguments.force)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="slime-like", description="Reinforcement learning of language models, 3D-parallel.", allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=f"slime-like {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_configured(commands, "train", "train a model as a YAML file and flags describe it", "Train.")
    what = "Measure the held-out accuracy of model.path. What only training uses is not looked at."
    _add_configured(commands, "eval", "held-out accuracy of model.path", what)
    launch_command.add_parser(commands)
    plan_command.add_parser(commands)
    score_command.add_parser(commands)
    verify_command.add_parser(commands)
    convert_command.add_parser(commands)
    _add_make_tiny_model(commands)
    report.add_parser(commands)
    return parser


def _add_configured(
    commands: argparse._SubParsersAction[argparse.ArgumentParser], name: str, summary: str, what: str
) -> None:
    command = commands.add_parser(
        name,
        help=summary,
        usage=f"slime-like {name} [CONFIG.yaml] [--section.field VALUE ...]",
        description=f"{what}\nEvery field of the YAML file is also a flag, and the flag wins. Relative paths are\n"
        "relative to the current directory.",
        epilog=fields_help(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    command.add_argument("config", nargs="?", type=Path, metavar="CONFIG.yaml", help="configuration file")


def _add_make_tiny_model(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    tiny = commands.add_parser(
        "make-tiny-model",
        help="write a tiny Hugging Face checkpoint and arithmetic data",
        description="Write a tiny, randomly initialised Hugging Face checkpoint into OUT, sums of two numbers into "
        "OUT/data (train.jsonl, sft.jsonl, eval.jsonl), and products for the calculator environment into "
        "OUT/data/calculator. Nothing is downloaded. The model takes 1024 tokens, prompt and response together, so "
        "that data.max_prompt_tokens must be lower than its default: 48 suffices. The last line printed is a command "
        "that trains on the sums.",
        allow_abbrev=False,
    )
    tiny.add_argument("out", type=given_path, metavar="OUT", help="directory to write")
    tiny.add_argument("--family", choices=FAMILIES, default="qwen3", help="model family (default: %(default)s)")
    tiny.add_argument("--seed", type=int, default=0, help="seed of weights and data (default: %(default)s)")
    tiny.add_argument("--force", action="store_true", help="write into OUT even where it holds files")


def _loaded(path: Path | None, flags: list[str], needs_of: NeedsOf, temporary: Path | None = None) -> RunConfig:
    """Args: ``temporary`` is the run directory where none is named."""
    try:
        config = load_config(path, flags, temporary)
    except ConfigError as error:
        raise with_problems_of_files(error, needs_of) from error
    require_valid(config, needs_of(config))
    return config


def _evaluate(path: Path | None, flags: list[str]) -> int:
    temporary = temporary_run_dir("eval")
    config = _loaded(path, flags, evaluation_needs, temporary)
    InterruptHandler().install()
    from slime_like.evaluate import evaluate

    if warning := version_warning(config.rollout.python, config.rollout.engine):
        print(f"slime-like: {warning}", file=sys.stderr)
    with traceback_kept(config.run_dir):
        result = evaluate(config, temporary=config.run_dir == temporary)
    for name, part in {"held-out": result.overall, **result.datasets}.items():
        passes = "".join(f", pass@{k} {value:.3f}" for k, value in part.pass_at.items())
        print(f"{name} accuracy: {part.accuracy:.3f}{passes} over {part.num_responses} responses")
        print(
            f"{name} response length: {part.response_length_mean:.1f} tokens, {part.truncated_fraction:.1%} truncated"
        )
    return 0


def _train(path: Path | None, flags: list[str]) -> int:
    config = _loaded(path, flags, training_needs)
    InterruptHandler().install()
    with permanent_allocations():
        from slime_like.train import train  # imports torch and Ray: only once the configuration is right

    with traceback_kept(config.run_dir):
        _print_summary(train(config))
    return 0


def _print_summary(summary: TrainSummary) -> None:
    if summary.accuracy_before is not None and summary.accuracy_after is not None:
        print(f"held-out accuracy: {summary.accuracy_before:.3f} before, {summary.accuracy_after:.3f} after")
    print(f"throughput: {summary.tokens_per_second:.0f} tokens/s")
    print(f"wall time: {summary.wall_s:.1f} s")
    for name, path in summary.files.items():
        print(f"{name}: {path}")


def _make_tiny_model(out: Path, family: str, seed: int, force: bool) -> int:
    problem = directory_problem(out)
    if problem:
        raise ConfigError([f"OUT={out} {problem}"])
    if not 0 <= seed <= MAX_SEED:
        raise ConfigError([f"--seed={seed} is out of range; it must be 0 to {MAX_SEED}"])
    if out.is_dir() and any(out.iterdir()) and not force:
        raise ConfigError([f"OUT={out} is not empty; give another directory, or --force to write into it"])
    from slime_like.examples.calculator_data import make_calculator_data
    from slime_like.examples.tiny_model import make_arithmetic_data, make_tiny_model

    make_tiny_model(out, family=family, seed=seed)
    make_arithmetic_data(out / "data", seed=seed)
    make_calculator_data(out / "data" / "calculator", seed=seed)
    print(f"model: {out}\ndata:  {out / 'data'}\ntrain: {shlex.join(_first_training(out))}")
    return 0


def _first_training(out: Path) -> list[str]:
    """A command that learns from the demonstrations: rewards would find nothing right in what an untrained model
    writes. It names no recipe, and so works wherever OUT does."""
    flags = {
        "algorithm.loss": "sft",
        "model.path": str(out),
        "data.train": str(out / "data" / "sft.jsonl"),
        "data.max_prompt_tokens": "48",
        "trainer.optimizer.lr": "0.002",
        "run_dir": str(out / "run"),
    }
    return ["slime-like", "train", *(word for name, value in flags.items() for word in (f"--{name}", value))]
