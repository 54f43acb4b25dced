"""The table of ``slime-like``'s subcommands, and how one of them is called."""

import argparse
import re
import sys
from collections.abc import Sequence

from slime_like import __version__
from slime_like.commands import (
    convert,
    launch,
    plan,
    rehearse,
    report,
    score,
    tasks,
    tiny_model,
    train,
    verify,
    verify_engine,
)
from slime_like.commands.command import Command
from slime_like.config.reading.fields import all_fields
from slime_like.errors import REFUSED
from slime_like.system.interrupts import InterruptHandler

COMMANDS: Sequence[Command] = (
    train.TRAIN,
    train.EVALUATE,
    launch.COMMAND,
    plan.COMMAND,
    rehearse.COMMAND,
    score.COMMAND,
    verify.COMMAND,
    verify_engine.COMMAND,
    *convert.COMMANDS,
    tiny_model.COMMAND,
    tasks.COMMAND,
    report.COMMAND,
)
_GROUPS = {
    "verify": ("compare parallel layouts with one rank, or try an engine", None),
    "convert": ("convert checkpoints between Hugging Face and Megatron, or compare them", convert.DESCRIPTION),
}
_OPTION = re.compile(r"^--\w[\w-]*(?=$|=)")


def run(argv: Sequence[str]) -> int:
    """Run the subcommand that the arguments name; its exit code. Errors meant for people are ``SlimeLikeError``s."""
    given = {_with_underscores(argument): argument for argument in argv}
    argv = list(map(_with_underscores, argv))
    named = [command for command in COMMANDS if argv[: len(command.words)] == command.words]
    if not named or {"-h", "--help"} & set(argv):
        _parser(named).parse_args(argv)  # which shows help or what is wrong, and exits
        return REFUSED
    InterruptHandler().install()
    if "" not in sys.path:
        sys.path.append("")  # custom code in the current directory is found, behind everything that is installed
    options, flags = named[0].parse(argv[len(named[0].words) :])
    # What is unknown is named as it was given.
    return named[0].run(options, [given.get(flag, flag) if _name(flag) not in all_fields() else flag for flag in flags])


def _name(flag: str) -> str:
    return flag.removeprefix("--").partition("=")[0]


def _with_underscores(argument: str) -> str:
    """An option's name with underscores for dashes; everything else as it is."""
    return _OPTION.sub(lambda option: "--" + option[0][2:].replace("-", "_"), argument)


def _parser(whole: Sequence[Command]) -> argparse.ArgumentParser:
    """Args: ``whole`` are the commands whose help may be shown."""
    parser = argparse.ArgumentParser(
        prog="slime-like", description="RL post-training of language models, 3D-parallel.", allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=f"slime-like {__version__}")
    lists = {"": parser.add_subparsers(dest="command", required=True, metavar="COMMAND")}
    for command in COMMANDS:
        group = " ".join(command.words[:-1])
        if group not in lists:
            summary, description = _GROUPS[group]
            inner = lists[""].add_parser(
                group,
                help=summary,
                description=description,
                formatter_class=argparse.RawDescriptionHelpFormatter,
                allow_abbrev=False,
            )
            lists[group] = inner.add_subparsers(dest="what", required=True, metavar="COMMAND")
        command.add_parser(lists[group], command in whole)
    return parser
