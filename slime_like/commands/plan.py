"""``slime-like plan`` and ``slime-like rehearse``: try a run before it has a cluster."""

import argparse
import json
import logging
import shutil
import sys
import tempfile
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slime_like.checks.run_files import directory_problem
from slime_like.commands.command import Command, at_least_one, option, parse_path, temporary_run_dir
from slime_like.config import DataConfig, RolloutConfig, RunConfig
from slime_like.config.reading.load import load_config
from slime_like.errors import ConfigError, Problem
from slime_like.system.words import pluralize

if TYPE_CHECKING:
    from slime_like.planning.lengths import Lengths

_DOES_NOT_FIT, _FOUND = 1, 1
_LEAST_STEPS = 2
_MEAN = "tokens, for the predicted time (default: the configured limit)"


def _plan(options: argparse.Namespace, flags: list[str]) -> int:
    output: Path | None = options.output
    if output is not None:
        problem = "is a directory; give a file" if output.is_dir() else directory_problem(output.absolute().parent)
        if problem:
            raise ConfigError(f"--output {output} {problem}", code="output-unusable")
    if options.search and options.preflight:
        raise ConfigError("--preflight checks one layout; remove it, or --search", code="options-conflict")
    config = load_config(options.config, flags, None if options.config else temporary_run_dir("plan"), _problems)
    _require_possible(options, config.data, config.rollout, config.max_model_len)
    # Megatron warns about every missing package that speeds up training; nothing is trained here.
    logging.getLogger("megatron").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module=r"megatron\.")
    warnings.filterwarnings("ignore", module=r"torch\.distributed", category=FutureWarning)
    from slime_like.planning.plan import make_plan
    from slime_like.planning.planned_run import PlannedRun
    from slime_like.planning.search import search
    from slime_like.planning.table import print_candidates, print_plan

    planned = PlannedRun.of(config, options.mean_prompt, _lengths(options, config))
    if options.search:
        found = search(planned, options.top, _note)
        _note("")
        _write(output, {"layouts": [candidate.to_json() for candidate in found]})
        print_candidates(found, config.cluster.host_memory_gib is not None)
        return 0 if found else _DOES_NOT_FIT
    plan = make_plan(planned, options.preflight, _note)
    _note("")
    _write(output, plan.to_json())
    if not plan.kinds:  # nothing was worked out
        raise ConfigError(plan.problems, code="plan-rejected")
    print_plan(plan)
    return _DOES_NOT_FIT if plan.problems else 0


def _problems(config: RunConfig) -> list[Problem]:
    """Return the problems that do not depend on this machine."""
    from slime_like.checks import training_needs
    from slime_like.checks.check import check

    return check(config, training_needs(config) - {"files", "code"})


def _lengths(options: argparse.Namespace, config: RunConfig) -> "Lengths | None":
    """Return the distribution of responses' tokens: of a file or a run, or of the given mean and maximum."""
    from slime_like.planning.lengths import Lengths, read_lengths

    if options.lengths is not None:
        return read_lengths(options.lengths)
    if options.mean_response is None and options.max_response is None:
        return None
    longest = options.max_response or config.rollout.max_new_tokens
    return Lengths(options.mean_response or longest, longest)


def _require_possible(options: argparse.Namespace, data: DataConfig, rollout: RolloutConfig, longest: int) -> None:
    """Reject lengths above their limits, and contradictory ones."""
    given = [name for name in ("mean_response", "max_response") if getattr(options, name) is not None]
    if options.lengths is not None and given:
        raise ConfigError(f"--lengths contains them; remove --{' and --'.join(given)}", code="options-conflict")
    limits = {
        "mean_prompt": ("data.max_prompt_tokens", data.max_prompt_tokens),
        "mean_response": ("rollout.max_new_tokens", rollout.max_new_tokens),
        "max_response": ("rollout.max_new_tokens", rollout.max_new_tokens),
    }
    if rollout.agent.is_set:  # its rows contain a history
        limits = dict.fromkeys(limits, ("rollout.max_model_len", longest))
    problems = [
        f"--{name}={mean} is more than {field}={most}; give at most {most}"
        for name, (field, most) in limits.items()
        if (mean := getattr(options, name)) is not None and mean > most
    ]
    if len(given) == 2 and options.mean_response > options.max_response:
        problems.append(f"--mean_response={options.mean_response} is above --max_response={options.max_response}")
    if problems:
        raise ConfigError(problems, code="options-conflict")


def _write(output: Path | None, content: dict[str, Any]) -> None:
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(json.dumps(content, indent=1, default=str) + "\n", encoding="utf-8")


def _note(text: str) -> None:
    """Show progress on a terminal; "" clears it."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)


PLAN = Command(
    "plan",
    "check whether a run fits a cluster, and predict a step's time; needs no GPU and no weights",
    _plan,
    "Plan a run on a cluster from this machine: the memory of ranks and engines, the predicted time of a\n"
    "step, and all problems that would stop the run at its start. --output adds every kind of rank and its\n"
    "messages. The model's config.json suffices. Exit code 0: fits. 1: does not fit. 2: the layout is invalid.",
    (
        option("--output", type=parse_path, metavar="FILE", help="also write the plan (--search: layouts) as JSON"),
        option("--search", action="store_true", help="list layouts that fit these GPUs, fastest first"),
        option("--top", type=at_least_one, default=5, metavar="N", help="layouts to list (default: %(default)s)"),
        option("--preflight", action="store_true", help="check files, disk and port of this machine of the cluster"),
        option("--mean_prompt", type=at_least_one, metavar="TOKENS", help=f"mean prompt {_MEAN}"),
        option("--mean_response", type=at_least_one, metavar="TOKENS", help=f"mean response {_MEAN}"),
        option("--max_response", type=at_least_one, metavar="TOKENS", help="longest response (default: the limit)"),
        option(
            "--lengths",
            type=parse_path,
            metavar="FILE|RUN_DIR",
            help="instead, responses' tokens: a file with a number per line, or a run with metrics",
        ),
    ),
    "[--output FILE] [--search] [--section.field VALUE ...]",
    {"[CONFIG.yaml]": "configuration file"},
    epilog="Every field of the configuration is a flag: --cluster.nodes 8 --cluster.gpus_per_node 8 "
    "--cluster.gpu h200-141gb\n--trainer.parallel.tensor 4 and so on; see `slime-like train --help` and "
    "docs/planning.md.",
)


def _rehearse(options: argparse.Namespace, flags: list[str]) -> int:
    if options.small_steps < _LEAST_STEPS:
        problem = f"must be at least {_LEAST_STEPS}: before and after the kill"
        raise ConfigError(f"--small_steps={options.small_steps} {problem}", code="argument-value")
    config = load_config(options.config, flags, more=_problems)
    from slime_like.verification.rehearsal import rehearse

    found, directory = 0, _make_directory(options.directory)
    try:
        for is_sound, stage, text in rehearse(config, directory, options.small_steps):
            found += not is_sound
            print(f"{'ok' if is_sound else 'FOUND':5}  {stage:11}  {text}", flush=True)
        print(f"rehearsal: {pluralize(found, 'fault')} found" if found else "rehearsal: nothing found")
    finally:
        if found:
            print(f"rehearsal: recipe and logs are in {directory}")
        elif options.directory is None:
            shutil.rmtree(directory, ignore_errors=True)
    return _FOUND if found else 0


def _make_directory(directory: Path | None) -> Path:
    if directory is None:
        return Path(tempfile.mkdtemp(prefix="slime-like-rehearsal-"))
    try:
        directory.mkdir(parents=True)
    except OSError as error:
        remedy = "give a new one" if isinstance(error, FileExistsError) else "give another place"
        raise ConfigError(f"--directory={directory}: {error.strerror}; {remedy}", code="argument-value") from error
    return directory.absolute()


REHEARSE = Command(
    "rehearse",
    "try a recipe on this machine with a small model: steps, kill, resume, export",
    _rehearse,
    "Run a small version of a recipe on this machine before you rent a cluster. It uses the real tokenizer, rows,\n"
    "template, rewards, environment and loss with a small random model like the real one, whose weights are not\n"
    "needed. Every parallel axis has size 2 if eight ranks suffice. The run trains, evaluates and writes a\n"
    "checkpoint; then it is killed with kill -9, resumed and exported. Exit code 1: a stage found a fault.",
    (
        option("--directory", type=parse_path, metavar="DIR", help="new directory for model, recipe and run to keep"),
        option("--small_steps", type=int, default=3, metavar="N", help="steps of the small run (default: %(default)s)"),
    ),
    usage="[--directory DIR] [--small_steps N] [--section.field VALUE ...]",
    paths={"[CONFIG.yaml]": "configuration of the real run"},
    epilog="Every field of the configuration is a flag: see `slime-like train --help`.",
)
