"""A subcommand of ``slime-like``: its help, its function, and arguments that several subcommands share."""

import argparse
import tempfile
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Any

from slime_like.checks.run_files import directory_problem
from slime_like.config.base import require_path
from slime_like.config.reading.load import is_assignment, load_config
from slime_like.errors import ConfigError
from slime_like.models.converted import MODEL, WEIGHTS, converted_problem, is_converted, training_checkpoint

CommandOption = tuple[str, Mapping[str, Any]]


def option(name: str, **settings: Any) -> CommandOption:
    """Return an option of a command, with the keyword arguments of argparse's ``add_argument``."""
    return name, settings


@dataclass(frozen=True, slots=True)
class Command:
    """One row of the command table.

    Attributes:
        run: receives the command's arguments and the flags of the configuration.
        usage: what follows the name and the paths; "" leaves the usage to argparse.
        paths: leading paths and their help, for a command that takes flags. Such flags take any number of values, so
            the paths come first. A path in brackets is optional.
        takes_flags: unknown options are flags of the configuration. If false, flags follow ``--``.
    """

    name: str
    summary: str
    run: Callable[[argparse.Namespace, list[str]], int]
    description: str
    options: Sequence[CommandOption] = ()
    usage: str = ""
    paths: Mapping[str, str] = field(default_factory=dict)
    takes_flags: bool = True
    epilog: Callable[[], str] | str = ""

    def print_help(self) -> None:
        parser = self._parser()
        parser.epilog = self.epilog() if callable(self.epilog) else self.epilog
        parser.print_help()

    def parse(self, arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
        """Split what follows the name into the command's arguments and flags of the configuration.

        Raises ``SystemExit`` if an argument is wrong, missing or unexpected. argparse prints which.
        """
        if not self.takes_flags:
            own = list(takewhile(lambda argument: argument != "--", arguments))
            return self._parser().parse_args(own), list(arguments[len(own) + 1 :])
        leading = list(takewhile(lambda one: not one.startswith("--") and not is_assignment(one), arguments))
        paths = self._parser(options=False).parse_args(leading)
        return self._parser(paths=False).parse_known_args(list(arguments[len(leading) :]), paths)

    def _parser(self, paths: bool = True, options: bool = True) -> argparse.ArgumentParser:
        parser = argparse.ArgumentParser(
            prog=f"slime-like {self.name}",
            usage=" ".join(["slime-like", self.name, *self.paths, self.usage]) if self.usage else None,
            description=self.description,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        for name, text in self.paths.items() if paths else ():
            shown, nargs = name.strip("[]"), "?" if name.startswith("[") else None
            key = shown.partition(".")[0].lower()  # config of [CONFIG.yaml], hf_dir of HF_DIR
            parser.add_argument(key, nargs=nargs, type=parse_path, metavar=shown, help=text)
        if options:
            for name, settings in self.options:
                parser.add_argument(name, **settings)
        return parser


def parse_path(text: str) -> Path:
    """Parse a path argument. Text that cannot name a file is rejected."""
    try:
        require_path(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return Path(text)


def at_least_one(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def _at_least_minus_one(text: str) -> int:
    if text not in ("-1", "0") and not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least -1")
    return int(text)


RESTARTS = option(
    "--restarts",
    type=_at_least_minus_one,
    default=0,
    metavar="N",
    help="start again, from the newest checkpoint, up to N times after a death; -1: any number of times",
)


def has_flag(flags: Sequence[str], name: str) -> bool:
    """Return whether the flags contain ``--name value`` or ``--name=value``."""
    return name in flag_names(flags)


def flag_names(flags: Sequence[str]) -> list[str]:
    return sorted({flag.removeprefix("--").partition("=")[0] for flag in flags if flag.startswith("--")})


def temporary_run_dir(command: str) -> Path:
    """Return a directory that does not exist yet, for a command that leaves nothing behind."""
    return Path(tempfile.gettempdir()) / f"slime-like-{command}-{uuid.uuid4().hex[:12]}"


def output_problem(output: Path, read: Mapping[str, Sequence[Path]]) -> str | None:
    """Return why ``--output`` cannot be written, with the remedy, or ``None``. It must not be a file in ``read``."""
    if output.exists() and not output.is_file():
        return f"--output={output}: is not a regular file and would be replaced; give a file"
    for name, files in read.items():
        if output.exists() and any(file.exists() and output.samefile(file) for file in files):
            return f"--output={output}: is also given as {name} and would be replaced; give another file"
    if not output.absolute().parent.is_dir():
        return f"--output={output}: its directory does not exist; create it"
    problem = directory_problem(output.resolve().parent)
    return f"--output={output}: its directory {problem}" if problem else None


def find_weights(checkpoint: Path, flags: Sequence[str]) -> tuple[Sequence[str], Path | None]:
    """Return flags that name the model and its precision, and the training checkpoint with the weights, if it is one.

    Raises ``ConfigError`` if it is not a checkpoint, it was converted and has damaged files, or its model is unknown.
    """
    named = has_flag(flags, "model.path")
    if (checkpoint / "config.json").is_file():
        if named:
            problem = f"--model.path: CHECKPOINT={checkpoint} is the model already; remove the flag"
            raise ConfigError(problem, code="flag-excluded")
        return ("--model.path", str(checkpoint)), None
    weights = checkpoint / WEIGHTS
    if is_converted(checkpoint) and weights.is_dir():
        if damage := converted_problem(checkpoint):
            raise ConfigError(f"CHECKPOINT={checkpoint} {damage}", code="checkpoint-damaged")
        return () if named else ("--model.path", str(checkpoint / MODEL)), weights.resolve()
    if not (checkpoint / "state.json").is_file() or not weights.is_dir():
        whole = training_checkpoint(checkpoint) or "a Hugging Face directory or a run's checkpoints/step-N"
        problem = "is not a checkpoint" if checkpoint.exists() else "does not exist"
        raise ConfigError(f"CHECKPOINT={checkpoint} {problem}; give {whole}", code="wrong-checkpoint")
    run_config = checkpoint.resolve().parent.parent / "config.yaml"
    if run_config.is_file():
        config = load_config(run_config)
        lora = config.model.lora
        model = ["--model.path", str(config.model.path), "--model.dtype", config.model.dtype]
        if lora.is_set:
            model += ["--model.lora.rank", str(lora.rank), "--model.lora.alpha", str(lora.alpha)]
            model += ["--model.lora.targets", *lora.targets]
        return (*model, "--trainer.backend", config.trainer.backend), weights.resolve()
    if not named:
        problem = f"it does not contain its model's dimensions, and {run_config} does not exist"
        remedy = "give --model.path, the Hugging Face directory that the run started from"
        raise ConfigError(f"CHECKPOINT={checkpoint}: {problem}; {remedy}", code="model-unknown")
    return (), weights.resolve()
