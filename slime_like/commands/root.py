"""The table of ``slime-like``'s subcommands, and how a subcommand is called."""

import argparse
import re
import sys
from collections.abc import Sequence

from slime_like import __version__
from slime_like.commands import convert, launch, make, plan, report, train, verify
from slime_like.commands.command import Command
from slime_like.errors import REFUSED
from slime_like.system.interrupts import InterruptHandler

COMMANDS: Sequence[Command] = (
    train.TRAIN,
    train.EVALUATE,
    launch.COMMAND,
    plan.PLAN,
    plan.REHEARSE,
    train.SCORE,
    verify.LAYOUTS,
    verify.ENGINE,
    verify.OBJECTIVE,
    report.EXPLAIN_GAP,
    report.REPLAY,
    *convert.COMMANDS,
    make.TINY_MODEL,
    make.TASKS,
    report.REPORT,
)
_GROUPS = {
    "verify": ("compare parallel layouts with one rank, try an engine, or prove an objective", None),
    "convert": ("convert checkpoints between Hugging Face and Megatron, or compare them", convert.DESCRIPTION),
}
_OPTION = re.compile(r"^--\w[\w-]*(?=$|=)")


def run(argv: Sequence[str]) -> int:
    """Run the subcommand that the arguments name, and return its exit code.

    Dashes and underscores are the same in options. Raises ``SystemExit`` after help, and if the arguments are wrong.
    """
    argv = [_OPTION.sub(lambda option: "--" + option[0][2:].replace("-", "_"), argument) for argument in argv]
    command = next((one for one in COMMANDS if argv[: one.name.count(" ") + 1] == one.name.split()), None)
    if command is None:
        _parser().parse_args(argv)  # shows help or what is wrong, and exits
        return REFUSED
    if {"-h", "--help"} & set(argv):
        command.print_help()
        return 0
    InterruptHandler().install()
    if "" not in sys.path:
        sys.path.append("")  # custom code in the current directory is found, after everything that is installed
    arguments, flags = command.parse(argv[len(command.name.split()) :])
    arguments.argv = argv  # for --restarts
    return command.run(arguments, flags)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="slime-like", description="RL post-training of language models, 3D-parallel.", allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=f"slime-like {__version__}")
    lists = {"": parser.add_subparsers(required=True, metavar="COMMAND")}
    for command in COMMANDS:
        group, _, word = command.name.rpartition(" ")
        if group not in lists:
            summary, description = _GROUPS[group]
            inner = lists[""].add_parser(group, help=summary, description=description)
            lists[group] = inner.add_subparsers(required=True, metavar="COMMAND")
        lists[group].add_parser(word, help=command.summary)
    return parser
