"""What another project's settings are here: values, what has no counterpart, and what needs none."""

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import yaml

from slime_like.config.foreign.launch_script import Launch
from slime_like.config.reading.fields import UNDECIDED, all_fields
from slime_like.system.credentials import without_credentials

_TO_DECIDE = "To decide"
_TO_SET, _JOINED = re.compile(r"\bset [^;]*"), re.compile(r", and |, | and ")
_NAMES = re.compile(
    rf"(?<![\w./-])(?P<first>[a-z_][a-z_0-9.]*\w)(?P<others>(?:(?:{_JOINED.pattern})[a-z_0-9]+(?![\w.]))*)(?![\w/=-])"
)
UNKNOWN_VALUE = "its value is not in the file"
_ELSEWHERE = "another file defines this array; add its settings"
_IDLE = "the command that starts the trainer does not take it"
_FURTHER = "further arguments, known only when the script runs; add what they set, or change"
_SOURCED = "this file is not read; it may set what the command takes"
_CUT = "a shell does not pass it, as the command ends before it; set what it was to set"


@dataclass(slots=True)
class Imported:
    """The settings that are read so far.

    Attributes:
        source: the project's name.
        values: field here, to its value and what it was there.
        open_points: what somebody has to decide: a setting there, and why it has no value here.
        unmatched: settings there that have no counterpart here, or none that is known.
        needless: settings there that need none here, and why.
        left: fields here that a rule left to the user.
    """

    source: str
    values: dict[str, tuple[Any, str]] = field(default_factory=dict)
    open_points: dict[str, str] = field(default_factory=dict)
    unmatched: list[str] = field(default_factory=list)
    needless: dict[str, str] = field(default_factory=dict)
    left: frozenset[str] = frozenset()

    def set(self, name: str, value: Any, origin: str) -> None:
        """Take over a value; one that holds a credential is left to the user."""
        shown = without_credentials(name, value)
        if shown == str(value):
            self.values[name] = (value, origin)
        else:
            self.decide(f"{origin}: {shown}", f"holds a credential; set {name}")

    def leave_reward(self) -> None:
        """Write the reward's field, which has to be filled in."""
        self.set("reward.functions", [], "to decide, as [{name: math_verify}]")

    def decide(self, setting: str, why: str) -> None:
        """Leave a setting to the user."""
        self.open_points[setting] = why

    def list_arguments(self, launch: Launch, further: Iterable[str]) -> None:
        """List what a launch script passes, or only has, without a value here.

        Args:
            further: arguments that are known only when the script runs.
        """
        self.open_points |= dict.fromkeys(launch.absent, _ELSEWHERE) | dict.fromkeys(further, _FURTHER)
        self.open_points |= dict.fromkeys(launch.cut, _CUT) | dict.fromkeys(launch.sourced, _SOURCED)
        self.needless |= dict.fromkeys(launch.idle, _IDLE)

    def add(self, other: "Imported", conditions: str = "") -> None:
        """Take over all that another one has, with the conditions of its values."""
        self.values |= {name: (value, origin + conditions) for name, (value, origin) in other.values.items()}
        self.open_points |= {setting: why + conditions for setting, why in other.open_points.items()}
        self.needless |= {setting: why + conditions for setting, why in other.needless.items()}
        self.left |= other.left

    def leave(self, targets: str) -> None:
        """Leave the fields that are named to the user where they have no value."""
        self.left |= frozenset(_fields_in(targets)) - self.values.keys()

    def mentions(self, name: str) -> bool:
        """Whether a value, what is to decide or what is needless names the setting; a name that is a usual word, at the
        beginning alone."""
        if name.isidentifier():
            origins = [origin for _, origin in self.values.values()]
            return any(re.match(rf"{name}(?!\w)", text) for text in (*origins, *self.open_points, *self.needless))
        word = re.compile(rf"(?<![\w.-]){re.escape(name)}(?![\w-]|\.\w)")
        points = [*self.open_points.items(), *self.needless.items()]
        return any(map(word.search, [origin for _, origin in self.values.values()])) or any(
            word.search(setting) or word.search(why) for setting, why in points
        )

    def text(self) -> str:
        """A configuration in YAML: each line with its origin, and what is not in it as comments."""
        lines = [
            f"# Imported from settings of {self.source}. Each comment names the setting there; where the file does not",
            f"# give it, the value is {self.source}'s default.",
        ]
        for title, points in ((_TO_DECIDE, self.open_points), ("Needs no setting here", self.needless)):
            lines += [f"#\n# {title}:"] * bool(points)
            lines += [f"# - {_one_line(setting)}: {_one_line(why)}" for setting, why in points.items()]
            if title == _TO_DECIDE and self.unmatched:
                lines += ["#\n# Not read; see whether the run depends on:"]
                lines += [f"# - {_one_line(setting)}" for setting in self.unmatched]
        values = dict.fromkeys(self.undecided, (UNDECIDED, "to decide")) | self.values
        return "\n".join([*lines, *_section("", dict(sorted(values.items(), key=_order)), 0)]) + "\n"

    @property
    def undecided(self) -> frozenset[str]:
        """Fields without a value that an open point names; a configuration is rejected until the user sets them."""
        found = {*self.left}
        for setting, why in self.open_points.items():
            demand = _TO_SET.search(why)
            found |= {*_fields_in(setting), *_fields_in(demand[0] if demand else "")}
        return frozenset(name for name in found if not any(f"{each}.".startswith(f"{name}.") for each in self.values))


def _fields_in(text: str) -> Iterator[str]:
    """Names of fields, also of those that follow one of their section, as in ``data.prompt_key, answer_key``."""
    fields = all_fields()
    for found in _NAMES.finditer(text):
        section = found["first"].rpartition(".")[0]
        others = [f"{section}.{word}" for word in _JOINED.split(found["others"])]
        yield from (name for name in (found["first"], *others) if name in fields)


def _one_line(text: str) -> str:
    """Text of a file for a comment: without credentials; a line's end in it would begin a setting, and other signs are
    no YAML."""
    shown = "".join(sign if sign.isprintable() else repr(sign)[1:-1] for sign in text)
    return without_credentials("", shown)


def _order(item: tuple[str, Any]) -> tuple[int, str]:
    """As the reference lists them; what lies below a field (arguments of an engine) with it."""
    names = list(all_fields())
    found = (number for number, name in enumerate(names) if item[0] == name or item[0].startswith(f"{name}."))
    return next(found, len(names)), item[0]


def _section(prefix: str, values: Mapping[str, tuple[Any, str]], depth: int) -> list[str]:
    lines, done = [], set[str]()
    for name, (value, origin) in values.items():
        head, dot, _ = name.removeprefix(prefix).partition(".")
        if head in done:
            continue
        done.add(head)
        indent = "  " * depth
        if dot:
            below = {other: one for other, one in values.items() if other.startswith(f"{prefix}{head}.")}
            lines += [f"{indent}{head}:", *_section(f"{prefix}{head}.", below, depth + 1)]
        else:
            lines.append(f"{indent}{head}: {_in_yaml(value)}  # {_one_line(origin)}")
    return lines


def _in_yaml(value: Any) -> str:
    """The value in one line."""
    is_plain = not isinstance(value, str) or value.isprintable()
    style = None if is_plain else '"'
    shown = yaml.safe_dump(value, default_flow_style=True, default_style=style, width=math.inf, allow_unicode=False)
    return shown.removesuffix("...\n").strip()
