"""A subcommand of ``slime-like``: its help, the function behind it, and arguments that several of them share."""

import argparse
import tempfile
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path

from slime_like.config.base import require_path
from slime_like.config.reading.load import is_assignment
from slime_like.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Command:
    """One row of the command table.

    Attributes:
        name: one word, or a group and a word.
        summary: its line in the list of commands.
        run: receives the command's arguments, and the flags of the configuration.
        description: the help's first paragraph.
        usage: what follows the name; "" leaves it to argparse.
        paths: leading arguments and their help, of a command that takes flags of the configuration among its options.
            Such flags take any number of values, so that paths come first. One in brackets is optional.
        takes_flags: options that it does not know are flags of the configuration.
        epilog: the help's last paragraph, or what makes it.
    """

    name: str
    summary: str
    run: Callable[[argparse.Namespace, list[str]], int]
    description: str
    add_arguments: Callable[[argparse.ArgumentParser], None] = lambda _: None
    usage: str = ""
    paths: Mapping[str, str] = field(default_factory=dict)
    takes_flags: bool = True
    epilog: str | Callable[[], str] = ""

    @property
    def words(self) -> list[str]:
        return self.name.split()

    def add_parser(self, commands: "argparse._SubParsersAction[argparse.ArgumentParser]", whole: bool) -> None:
        """Add the command to a list of commands; ``whole``: with everything that its help shows."""
        if not whole:
            commands.add_parser(self.words[-1], help=self.summary)
            return
        parser = commands.add_parser(
            self.words[-1],
            help=self.summary,
            usage=self._usage(),
            description=self.description,
            epilog=self.epilog() if callable(self.epilog) else self.epilog,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        for name, text in self.paths.items():
            optional = name.startswith("[")
            parser.add_argument(_key(name), nargs="?" if optional else None, metavar=name.strip("[]"), help=text)
        self.add_arguments(parser)

    def parse(self, arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
        """Split what follows the name into the command's arguments and flags of the configuration.

        Raises:
            ConfigError: a path is missing, or there is one too many.
        """
        parser = argparse.ArgumentParser(
            prog=f"slime-like {self.name}", usage=self._usage(), add_help=False, allow_abbrev=False
        )
        self.add_arguments(parser)
        if not self.takes_flags:
            own = list(takewhile(lambda argument: argument != "--", arguments))
            return parser.parse_args(own), list(arguments[len(own) + 1 :])
        leading = list(takewhile(lambda one: not one.startswith("--") and not is_assignment(one), arguments))
        required = [name for name in self.paths if not name.startswith("[")]
        if len(leading) < len(required):
            missing = "are missing; they come" if len(required) > 1 else "is missing; it comes"
            raise ConfigError(f"{' and '.join(required)} {missing} first: {self._usage()}", code="argument-missing")
        if len(leading) > len(required) == len(self.paths):
            extra = f"{leading[len(required)]} is one argument too many"
            raise ConfigError(f"{extra}: {self._usage()}", code="argument-unexpected")
        options, flags = parser.parse_known_args(list(arguments[len(leading) :]))
        for index, name in enumerate(self.paths):
            setattr(options, _key(name), _path(parser, leading[index]) if index < len(leading) else None)
        return options, [*leading[len(self.paths) :], *flags]

    def _usage(self) -> str | None:
        return " ".join(["slime-like", self.name, *self.paths, self.usage]) if self.usage else None


def _key(name: str) -> str:
    """Attribute of a path's value: ``config`` of ``[CONFIG.yaml]``, ``hf_dir`` of ``HF_DIR``."""
    return name.strip("[]").partition(".")[0].lower()


def _path(parser: argparse.ArgumentParser, text: str) -> Path:
    try:
        return given_path(text)
    except argparse.ArgumentTypeError as error:
        parser.error(str(error))


# ------------------------------------------------------------------------------------------------- shared arguments
def given_path(text: str) -> Path:
    """``type`` of a positional path: text that can name no file is rejected."""
    try:
        require_path(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return Path(text)


def has_flag(flags: Sequence[str], name: str) -> bool:
    """Return whether the flags hold ``--name value`` or ``--name=value``."""
    return any(flag == f"--{name}" or flag.startswith(f"--{name}=") for flag in flags)


def temporary_run_dir(command: str) -> Path:
    """A directory that does not exist yet, for a command that leaves nothing behind."""
    return Path(tempfile.gettempdir()) / f"slime-like-{command}-{uuid.uuid4().hex[:12]}"


def at_least_one(text: str) -> int:
    """``type`` of an option that counts something."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)
