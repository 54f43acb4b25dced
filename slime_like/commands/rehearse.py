"""``slime-like rehearse``."""

import argparse
import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from threading import Event

from slime_like.commands.command import Command, given_path
from slime_like.config.reading.load import load_config
from slime_like.errors import ConfigError
from slime_like.system.words import counted

_FOUND = 1
_LEAST_STEPS = 2


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--directory", type=given_path, metavar="DIR", help="new directory for model, recipe and run; it stays")
    add("--small_steps", type=int, default=3, metavar="N", help="steps of the small run (default: %(default)s)")


def _run(options: argparse.Namespace, flags: list[str]) -> int:
    if options.small_steps < _LEAST_STEPS:
        raise ConfigError(
            f"--small_steps={options.small_steps} must be at least {_LEAST_STEPS}: before and after the kill",
            code="argument-value",
        )
    config = load_config(options.config, flags)
    from slime_like.verification.rehearsal.rehearsal import rehearse

    found, kept = 0, Event()
    with _directory(options.directory, kept) as directory:
        for is_sound, stage, text in rehearse(config, directory, options.small_steps):
            found += not is_sound
            print(f"{'ok' if is_sound else 'FOUND':5}  {stage:11}  {text}", flush=True)
        print(f"rehearsal: {counted(found, 'fault')} found" if found else "rehearsal: nothing found")
        if found and options.directory is None:
            kept.set()
            print(f"rehearsal: recipe and logs are in {directory}")
    return _FOUND if found else 0


@contextlib.contextmanager
def _directory(given: Path | None, kept: Event) -> Iterator[Path]:
    """Args: of a temporary directory nothing but weights is removed where ``kept`` is set."""
    if given is None:
        directory = Path(tempfile.mkdtemp(prefix="slime-like-rehearsal-"))
        try:
            yield directory
        finally:
            if kept.is_set():
                for weights in directory.rglob("*.safetensors"):
                    weights.unlink()
            else:
                shutil.rmtree(directory, ignore_errors=True)
        return
    try:
        given.mkdir(parents=True)
    except OSError as error:
        remedy = "give a new one" if isinstance(error, FileExistsError) else "give another place"
        raise ConfigError(f"--directory {given}: {error.strerror}; {remedy}", code="argument-value") from error
    yield given.absolute()


COMMAND = Command(
    "rehearse",
    "try a recipe on this machine with a small model: steps, kill, resume, export",
    _run,
    "Run a recipe small on this machine before a cluster is rented. The real tokenizer, rows, template,\n"
    "rewards, environment and loss meet a small random model like the real one, whose weights are not needed;\n"
    "every parallel axis is kept at size 2 where eight ranks suffice. Steps, evaluation and a checkpoint, then\n"
    "kill -9, resume and export. Prints one line per stage. Exit code 1: a stage FOUND a fault.",
    _add_arguments,
    usage="[--directory DIR] [--small_steps N] [--section.field VALUE ...]",
    paths={"[CONFIG.yaml]": "configuration of the real run"},
    epilog="Every field of the configuration is a flag: see `slime-like train --help`.",
)
