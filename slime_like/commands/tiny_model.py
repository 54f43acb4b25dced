"""``slime-like make-tiny-model``."""

import argparse
import shlex
from pathlib import Path

from slime_like.commands.command import Command, given_path, option
from slime_like.config.run import MAX_SEED
from slime_like.errors import ConfigError
from slime_like.models.dimensions import FAMILIES


def _run(arguments: argparse.Namespace, _: list[str]) -> int:
    out, seed = arguments.out, arguments.seed
    from slime_like.checks.directories import directory_problem

    if problem := directory_problem(out):
        raise ConfigError(f"OUT={out} {problem}", code="output-unusable")
    if not 0 <= seed <= MAX_SEED:
        raise ConfigError(f"--seed={seed} must be 0 to {MAX_SEED}", code="field-range")
    if out.is_dir() and any(out.iterdir()) and not arguments.force:
        problem = f"OUT={out} is not empty; give another directory, or --force to write into it"
        raise ConfigError(problem, code="output-not-empty")
    from slime_like.examples.tiny_model import make_arithmetic_data, make_calculator_data, make_tiny_model

    make_tiny_model(out, family=arguments.family, seed=seed)
    make_arithmetic_data(out / "data", seed=seed)
    make_calculator_data(out / "data" / "calculator", seed=seed)
    print(f"model: {out}\ndata:  {out / 'data'}\ntrain: {shlex.join(_first_training(out, arguments.family))}")
    return 0


def _first_training(out: Path, family: str) -> list[str]:
    """Return a command that trains on demonstrations, because an untrained model would get no rewards.

    It names no recipe, so it works in every directory.
    """
    flags = {
        "algorithm.loss": "sft",
        "model.path": str(out),
        "data.train": str(out / "data" / "sft.jsonl"),
        "data.max_prompt_tokens": "48",
        "trainer.optimizer.lr": "0.002",
        "run_dir": str(out / "run"),
    } | ({} if FAMILIES[family].megatron else {"trainer.backend": "fsdp"})
    return ["slime-like", "train", *(word for name, value in flags.items() for word in (f"--{name}", value))]


COMMAND = Command(
    "make-tiny-model",
    "write a tiny Hugging Face checkpoint and arithmetic data",
    _run,
    "Write a tiny, randomly initialized Hugging Face checkpoint into OUT, sums of two numbers into\n"
    "OUT/data (train.jsonl, sft.jsonl, eval.jsonl), and products for the calculator environment into\n"
    "OUT/data/calculator. Nothing is downloaded. The model's sequences have at most 1024 tokens, so set\n"
    "data.max_prompt_tokens below its default, e.g. to 48. The last line printed is a command that trains\n"
    "on the sums.",
    (
        option("out", type=given_path, metavar="OUT", help="directory to write"),
        option("--family", choices=FAMILIES, default="qwen3", help="model family (default: %(default)s)"),
        option("--seed", type=int, default=0, help="seed of weights and data (default: %(default)s)"),
        option("--force", action="store_true", help="write into OUT even if it contains files"),
    ),
    takes_flags=False,
)
