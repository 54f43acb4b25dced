"""``slime-like import-config``."""

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

from slime_like.commands.command import Command, given_path
from slime_like.config.foreign.imported import Imported
from slime_like.config.foreign.launch_script import Argument, Launch, launches
from slime_like.config.foreign.shell_words import UnclosedQuoteError
from slime_like.config.foreign.slime import read_slime, starts_slime
from slime_like.config.foreign.verl import read_verl_script, read_verl_yaml, starts_verl
from slime_like.config.reading.yaml_text import read_document
from slime_like.errors import ConfigError


def imported_config(path: Path) -> Imported:
    """Read settings of verl or slime.

    Raises:
        ConfigError: the file cannot be read, has settings of neither, or starts several trainers.
    """
    try:
        content = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "it is no text"
        remedy = "give verl's YAML, or a launch script of verl or slime"
        raise ConfigError(f"FILE={path} cannot be read ({why}); {remedy}", code="file-not-readable") from error
    if path.suffix in (".yaml", ".yml"):
        document = read_document(content, str(path))
        if document.problems:
            raise ConfigError(document.problems)
        if isinstance(document.data, dict) and (
            "actor_rollout_ref" in document.data or "actor_rollout_ref" in str(document.data.get("defaults"))
        ):
            return read_verl_yaml(document.data)
    else:
        for starts, read in ((starts_verl, read_verl_script), (starts_slime, read_slime)):
            found = _launches(content, starts, path)
            if len(found) > 1:
                problem = f"starts the trainer in {len(found)} places; give a script that has one of them"
                raise ConfigError(f"FILE={path} {problem}", code="foreign-several")
            if found:
                return read(found[0])
    problem = (
        "starts neither verl's PPO trainer nor slime's; give verl's YAML, or the launch script that has the command "
        "itself, not inside quotes as of bash -c"
    )
    raise ConfigError(f"FILE={path} {problem}", code="foreign-unknown")


def _launches(script: str, starts: Callable[[Sequence[Argument]], bool], path: Path) -> list[Launch]:
    try:
        return launches(script, starts)
    except UnclosedQuoteError as error:
        problem = f"a quote in line {error} is not closed; bash -n FILE shows how a shell reads it"
        raise ConfigError(f"FILE={path} {problem}", code="foreign-unclosed") from error


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "file", type=given_path, metavar="FILE", help="verl's YAML (.yaml), or a launch script of verl or slime"
    )


def _run(given: argparse.Namespace, _: list[str]) -> int:
    print(imported_config(given.file).text(), end="")
    return 0


COMMAND = Command(
    "import-config",
    "turn settings of verl or slime into a configuration",
    _run,
    "Print a configuration made from verl's YAML, or from a launch script of verl or slime, which is read and\n"
    "not run. Each line names its origin. What has to be decided, and what needs no setting here, stands above\n"
    "as comments: nothing is guessed. Choose the reward, then: slime-like plan.",
    _add_arguments,
    takes_flags=False,
)
