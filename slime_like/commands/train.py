"""``slime-like train`` and ``slime-like eval``."""

import argparse
import sys

from slime_like.checks.definition import EVALUATION
from slime_like.commands.command import Command, given_path, option, output_problem, temporary_run_dir
from slime_like.commands.failure import traceback_kept
from slime_like.commands.reference import fields_help
from slime_like.config.reading.load import load_config
from slime_like.errors import ConfigError
from slime_like.system.memory import permanent_allocations
from slime_like.system.words import counted

_USAGE = "[--section.field VALUE ...]"
_FLAGS = (
    "\nEvery field of the YAML file is also a flag, and flags override the file. Relative paths are\n"
    "relative to the current directory."
)
_FILE = {"[CONFIG.yaml]": "configuration file"}


def _train(arguments: argparse.Namespace, flags: list[str]) -> int:
    from slime_like.checks.check import check, require_valid

    config = load_config(arguments.config, flags, more=check)
    require_valid(config)
    with permanent_allocations():
        from slime_like.train import train  # imports torch and Ray, so only after the checks

    with traceback_kept(config.run_dir):
        summary = train(config)
    if summary.accuracy_after is not None:
        until = summary.measured_otherwise_until
        before = f"{summary.accuracy_before:.3f} before, " if summary.accuracy_before is not None else ""
        print(f"held-out accuracy: {before}{summary.accuracy_after:.3f} after")
        if until:
            print(
                f"accuracies until step {until} were measured with other settings (config.until-step-{until:06d}.yaml) "
                "and cannot be compared"
            )
    print(f"throughput: {summary.tokens_per_second:.0f} tokens/s")
    print(f"wall time: {summary.wall_s:.1f} s")
    for name, path in summary.files.items():
        print(f"{name}: {path}")
    return 0


def _evaluate(arguments: argparse.Namespace, flags: list[str]) -> int:
    from slime_like.checks.check import check, require_valid

    temporary = temporary_run_dir("eval")
    config = load_config(arguments.config, flags, temporary, lambda given: check(given, EVALUATION))
    if config.model.lora.is_set:  # nothing sends merged weights
        lora = config.model.lora.model_copy(update={"sync": "adapter"})
        config = config.model_copy(update={"model": config.model.model_copy(update={"lora": lora})})
    if arguments.output is not None:
        read = {
            "evaluation.files": config.evaluation.files,
            "data.train": config.data.training_files,
            "the configuration": () if arguments.config is None else (arguments.config,),
        }
        if problem := output_problem(arguments.output, read):
            raise ConfigError(problem, code="file-unusable")
    require_valid(config, EVALUATION)
    from slime_like.checks.engine_install import version_warning
    from slime_like.evaluate import evaluate, write_responses

    if warning := version_warning(config.rollout.python, config.rollout.engine):
        print(f"slime-like: {warning}", file=sys.stderr)
    with traceback_kept(config.run_dir):
        result = evaluate(config, temporary=config.run_dir == temporary, keep_all=arguments.output is not None)
    for name, part in {"held-out": result.overall, **result.datasets}.items():
        passes = "".join(f", pass@{k} {value:.3f}" for k, value in part.pass_at.items())
        print(f"{name} accuracy: {part.accuracy:.3f}{passes} over {counted(part.num_responses, 'response')}")
        print(
            f"{name} response length: {part.response_length_mean:.1f} tokens, {part.truncated_fraction:.1%} truncated"
        )
    if arguments.output is not None:
        write_responses(config.model, result, arguments.output)
        print(f"responses: {arguments.output}")
    return 0


TRAIN = Command(
    "train",
    "train a model",
    _train,
    f"Train the model that a YAML file and flags describe.{_FLAGS}",
    usage=_USAGE,
    paths=_FILE,
    epilog=fields_help,
)
EVALUATE = Command(
    "eval",
    "measure the held-out accuracy of model.path, with the adapter model.lora.path if given",
    _evaluate,
    f"Measure the held-out accuracy of model.path. Fields that only training uses are ignored.{_FLAGS}",
    (option("--output", type=given_path, metavar="FILE", help="write all responses as JSONL, one row each"),),
    usage=f"[--output FILE] {_USAGE}",
    paths=_FILE,
    epilog=fields_help,
)
