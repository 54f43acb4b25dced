"""``slime-like train``, ``slime-like eval`` and ``slime-like score``."""

import argparse
import sys
from pathlib import Path

from slime_like.checks import EVALUATION, RANKS, loading_needs, training_needs
from slime_like.checks.run_files import checkpoint_problem
from slime_like.commands.command import (
    RESTARTS,
    Command,
    find_weights,
    has_flag,
    option,
    output_problem,
    parse_path,
    temporary_run_dir,
)
from slime_like.commands.failure import keep_traceback
from slime_like.commands.reference import fields_help
from slime_like.config.reading.load import load_config
from slime_like.errors import ConfigError, Problem
from slime_like.launch.restarts import Restarts, is_restarted
from slime_like.system.processes import exempt_from_gc
from slime_like.system.words import pluralize

_USAGE = "[--section.field VALUE ...]"
_FLAGS = (
    "\nEvery field of the YAML file is also a flag, and flags override the file. Relative paths are\n"
    "relative to the current directory."
)
_FILE = {"[CONFIG.yaml]": "configuration file"}


def _train(arguments: argparse.Namespace, flags: list[str]) -> int:
    from slime_like.checks.check import check, require_valid

    config = load_config(arguments.config, flags, more=check)
    if arguments.restarts and not is_restarted():
        require_valid(config, training_needs(config) - {"code"})  # the child imports the code, and torch
        return Restarts(config.run_dir, arguments.argv, config.resume, arguments.restarts).run()
    require_valid(config)
    with exempt_from_gc():
        from slime_like.train import train  # imports torch and Ray, so only after the checks

    with keep_traceback(config.run_dir):
        summary = train(config)
    if summary.accuracy_after is not None:
        until = summary.measured_otherwise_until
        before = f"{summary.accuracy_before:.3f} before, " if summary.accuracy_before is not None else ""
        print(f"held-out accuracy: {before}{summary.accuracy_after:.3f} after")
        if until:
            settings = f"config.until-step-{until:06d}.yaml"
            print(f"accuracies until step {until} were measured with other settings ({settings}): not comparable")
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
    from slime_like.checks.engines import version_warning
    from slime_like.evaluate import evaluate, write_responses

    if warning := version_warning(config.rollout.python, config.rollout.engine):
        print(f"slime-like: {warning}", file=sys.stderr)
    with keep_traceback(config.run_dir):
        result = evaluate(config, temporary=config.run_dir == temporary, keep_all=arguments.output is not None)
    for name, part in {"held-out": result.overall, **result.datasets}.items():
        passes = "".join(f", {key} {value:.3f}" for key, value in part.items() if key.startswith("pass@"))
        responses, truncated = pluralize(int(part["num_responses"]), "response"), part["truncated_fraction"]
        print(f"{name} accuracy: {part['accuracy']:.3f}{passes} over {responses}")
        print(f"{name} response length: {part['response_length_mean']:.1f} tokens, {truncated:.1%} truncated")
    if arguments.output is not None:
        write_responses(config.model, result, arguments.output)
        print(f"responses: {arguments.output}")
    return 0


def _score(files: argparse.Namespace, flags: list[str]) -> int:
    if problem := output_problem(files.output, {"--input": [files.input]}):
        raise ConfigError(problem, code="file-unusable")
    model, weights = find_weights(files.checkpoint, flags)
    from slime_like.checks.check import check

    config = load_config(None, [*model, *flags], temporary_run_dir("score"))
    loads = weights is None or config.model.lora.is_set
    problems = check(config, loading_needs(config.model, RANKS) if loads else RANKS)
    if weights is not None:
        problem = checkpoint_problem(weights.parent, config.model, config.trainer.backend, "CHECKPOINT")
        problems += [] if problem is None else [Problem("model.weights", problem)]
    if problems:
        raise ConfigError(problems)
    from slime_like.score import score  # imports torch and Ray, so only after the checks

    temporary = not has_flag(flags, "run_dir")
    summary = score(config, files.input, files.output, weights, temporary)
    speed = summary.tokens / summary.wall_s
    print(f"scored: {pluralize(summary.rows, 'sequence')}, {pluralize(summary.tokens, 'token')}, {speed:.0f} tokens/s")
    print(f"mean logprob: {summary.mean_logprob:.4f}")
    print(f"output: {files.output}")
    return 0


TRAIN = Command(
    "train",
    "train a model",
    _train,
    f"Train the model that a YAML file and flags describe.{_FLAGS}",
    (RESTARTS,),
    usage=f"[--restarts N] {_USAGE}",
    paths=_FILE,
    epilog=fields_help,
)
EVALUATE = Command(
    "eval",
    "measure the held-out accuracy of model.path, with the adapter model.lora.path if given",
    _evaluate,
    f"Measure the held-out accuracy of model.path. Fields that only training uses are ignored.{_FLAGS}",
    (option("--output", type=parse_path, metavar="FILE", help="write all responses as JSONL, one row each"),),
    usage=f"[--output FILE] {_USAGE}",
    paths=_FILE,
    epilog=fields_help,
)
SCORE = Command(
    "score",
    "compute per-token logprobs of given sequences, under any parallel layout",
    _score,
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
