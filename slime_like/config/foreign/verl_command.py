"""A command that starts verl's trainer, or one built on it: its overrides, and what they are added to."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from slime_like.config.foreign.launch_script import Argument

MEGATRON = "ppo_megatron_trainer"
OWN_BASES = ("ppo_trainer", MEGATRON, "_self_")
"""Configurations of verl, whose settings are its defaults."""
_OVERRIDE = re.compile(r"\+*([A-Za-z_][\w/@:]*(?:\.\w+)*)=(.*)", re.DOTALL)
_SECTION = re.compile(r"\+*[a-z_]+\.[\w.]+=")
_ASSIGNMENT = re.compile(r"\+*[\w@/:]+=")
_PROGRAM = re.compile(r"(?:.*[./])?main_(ppo|dapo)(?:\.py)?")
_BASE = re.compile(r"(--(?:config-name|config-path|config-dir)|-cn|-cp|-cd)(?:=(.*))?")


@dataclass(slots=True)
class Command:
    """What the words of a command are.

    Attributes:
        overrides: name and value, in order.
        own_bases: options that choose a configuration of verl's.
        bases: what chooses another one, as does another program.
        further: words that are known only when the script runs.
        others: words that are none of these.
        is_dapo: whether the program is verl's recipe of DAPO.
    """

    overrides: list[tuple[str, Argument]] = field(default_factory=list)
    own_bases: list[str] = field(default_factory=list)
    bases: list[str] = field(default_factory=list)
    further: list[str] = field(default_factory=list)
    others: list[str] = field(default_factory=list)
    is_dapo: bool = False


def is_program(text: str) -> bool:
    """Whether the word names verl's PPO trainer, or its recipe of DAPO."""
    return _PROGRAM.fullmatch(text) is not None


def read_command(words: Sequence[Argument]) -> Command:
    """Sort the words behind the program."""
    end = _arguments_begin(words)
    command = Command()
    if end and (program := _PROGRAM.fullmatch(words[end - 1].text)):
        command.is_dapo = program[1] == "dapo"
    elif end:
        command.bases.append(words[end - 1].text)
    rest = iter(words[end:])
    for word in rest:
        if match := _OVERRIDE.fullmatch(word.text):
            command.overrides.append((match[1], replace(word, text=match[2])))
        elif option := _BASE.fullmatch(word.text):
            name = option[2] if option[2] is not None else next(rest, word).text
            _add_base(command, option[1], name)
        elif word.known:
            command.others.append(word.text)
        else:
            command.further.append(word.text)
    return command


def _arguments_begin(words: Sequence[Argument]) -> int:
    """Where the program's arguments begin: behind verl's, or else behind the last word that may be a program."""
    sections = (place for place, word in enumerate(words) if _SECTION.match(word.text))
    first = next(sections, len(words))
    programs = [place for place in range(first) if _PROGRAM.fullmatch(words[place].text)]
    others = [place for place in range(first) if not re.match(rf"-|{_ASSIGNMENT.pattern}", words[place].text)]
    return (programs or others or [-1])[-1] + 1


def _add_base(command: Command, option: str, name: str) -> None:
    if option in ("--config-path", "-cp"):
        is_own = name.strip("./") == "config"  # beside verl's program
    else:
        is_own = option in ("--config-name", "-cn") and name.removesuffix(".yaml") in OWN_BASES
    (command.own_bases if is_own else command.bases).append(f"{option}={name}")
