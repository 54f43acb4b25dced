"""``slime-like rehearse``."""

import argparse
import shutil
import tempfile
from pathlib import Path

from slime_like.commands.command import Command, given_path, option
from slime_like.config.reading.load import load_config
from slime_like.errors import ConfigError
from slime_like.system.words import counted

_FOUND = 1
_LEAST_STEPS = 2


def _run(options: argparse.Namespace, flags: list[str]) -> int:
    if options.small_steps < _LEAST_STEPS:
        raise ConfigError(
            f"--small_steps={options.small_steps} must be at least {_LEAST_STEPS}: before and after the kill",
            code="argument-value",
        )
    config = load_config(options.config, flags)
    from slime_like.verification.rehearsal.rehearsal import rehearse

    found, directory = 0, _made(options.directory)
    try:
        for is_sound, stage, text in rehearse(config, directory, options.small_steps):
            found += not is_sound
            print(f"{'ok' if is_sound else 'FOUND':5}  {stage:11}  {text}", flush=True)
        print(f"rehearsal: {counted(found, 'fault')} found" if found else "rehearsal: nothing found")
    finally:
        if found:
            print(f"rehearsal: recipe and logs are in {directory}")
        elif options.directory is None:
            shutil.rmtree(directory, ignore_errors=True)
    return _FOUND if found else 0


def _made(directory: Path | None) -> Path:
    if directory is None:
        return Path(tempfile.mkdtemp(prefix="slime-like-rehearsal-"))
    try:
        directory.mkdir(parents=True)
    except OSError as error:
        remedy = "give a new one" if isinstance(error, FileExistsError) else "give another place"
        raise ConfigError(f"--directory={directory}: {error.strerror}; {remedy}", code="argument-value") from error
    return directory.absolute()


COMMAND = Command(
    "rehearse",
    "try a recipe on this machine with a small model: steps, kill, resume, export",
    _run,
    "Run a small version of a recipe on this machine before you rent a cluster. It uses the real tokenizer, rows,\n"
    "template, rewards, environment and loss with a small random model like the real one, whose weights are not\n"
    "needed. Every parallel axis has size 2 if eight ranks suffice. The run trains, evaluates and writes a\n"
    "checkpoint; then it is killed with kill -9, resumed and exported. Exit code 1: a stage found a fault.",
    (
        option("--directory", type=given_path, metavar="DIR", help="new directory for model, recipe and run to keep"),
        option("--small_steps", type=int, default=3, metavar="N", help="steps of the small run (default: %(default)s)"),
    ),
    usage="[--directory DIR] [--small_steps N] [--section.field VALUE ...]",
    paths={"[CONFIG.yaml]": "configuration of the real run"},
    epilog="Every field of the configuration is a flag: see `slime-like train --help`.",
)
