"""What another project's settings are here: values, what has no counterpart, and what needs none."""

import math
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import yaml

from slime_like.config.reading.fields import all_fields
from slime_like.config.reading.yaml_text import read_value

_SECRET = re.compile(r"(?:^|[-_.])(?:wandb[-_]key|api[-_]?key|access[-_]key|token|secret|password)$", re.IGNORECASE)
UNKNOWN_VALUE = "its value is known only when the script runs"
ELSEWHERE = "another file defines this array; add its settings"


@dataclass(slots=True)
class Imported:
    """The settings that are read so far.

    Attributes:
        source: the project's name.
        values: field here, to its value and what it was there.
        open_points: what somebody has to decide: a setting there, and why it has no value here.
        needless: settings there that need none here, and why.
    """

    source: str
    values: dict[str, tuple[Any, str]] = field(default_factory=dict)
    open_points: dict[str, str] = field(default_factory=dict)
    needless: dict[str, str] = field(default_factory=dict)

    def set(self, name: str, value: Any, origin: str) -> None:
        """Take over a value."""
        self.values[name] = (value, origin)

    def decide(self, setting: str, why: str) -> None:
        """Leave a setting to the user."""
        self.open_points[setting] = why

    def account_for(self, settings: Mapping[str, str]) -> None:
        """List settings that were read, by name with their text, if nothing names them."""
        for name, setting in settings.items():
            if not self.mentions(name):
                self.needless[setting] = "read together with others"

    def forget(self, names: Collection[str]) -> None:
        """Drop values that settings of these names would have had a part in: their defaults are no one's choice."""
        words = [re.compile(rf"(?<![\w.-]){re.escape(name)}(?![\w-])") for name in names]
        self.values = {
            field: (value, origin)
            for field, (value, origin) in self.values.items()
            if not any(word.search(origin) for word in words)
        }

    def mentions(self, name: str) -> bool:
        """Whether a value, what is to decide or what is needless names the setting."""
        word = re.compile(rf"(?<![\w.-]){re.escape(name)}(?![\w-])")
        return any(
            map(word.search, [*(origin for _, origin in self.values.values()), *self.open_points, *self.needless])
        )

    def text(self) -> str:
        """A configuration in YAML: each line with its origin, and what is not in it as comments."""
        lines = [
            f"# Imported from settings of {self.source}. Each comment names the setting there; where the file does not",
            f"# give it, the value is {self.source}'s default.",
        ]
        for title, points in (("To decide", self.open_points), ("Needs no setting here", self.needless)):
            lines += [f"#\n# {title}:"] * bool(points)
            lines += [f"# - {setting}: {why}" for setting, why in points.items()]
        return "\n".join([*lines, *_section("", dict(sorted(self.values.items(), key=_order)), 0)]) + "\n"


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
            shown = yaml.safe_dump(value, default_flow_style=True, width=math.inf).removesuffix("...\n").strip()
            lines.append(f"{indent}{head}: {shown}  # {origin}")
    return lines


@dataclass(frozen=True, slots=True)
class Given:
    """Settings of a source by name, each used at most once: what is left over is unknown."""

    values: dict[str, Any]
    unknown: frozenset[str] = frozenset()
    taken: dict[str, Any] = field(default_factory=dict)

    def take(self, name: str, default: Any = None) -> Any:
        """The value given, and take it away; ``default`` where there is none. One that is not known stays."""
        if name in self.unknown:
            return default
        value = self.values.pop(name, None)
        if value is None:
            return default
        self.taken[name] = value
        return value

    def known(self, name: str, default: Any) -> Any:
        """The value given, which stays; ``default`` where there is none, or none that is known."""
        return self.values[name] if self.has(name) else default

    def has(self, name: str) -> bool:
        return self.values.get(name) is not None and name not in self.unknown


def take_direct(
    given: Given,
    imported: Imported,
    direct: Mapping[str, tuple[str, Callable[[Any], Any]]],
    shown: Callable[[str], str],
) -> None:
    """Take over all settings that are one field here; those whose value is not of that kind are left to decide."""
    for name, (target, convert) in direct.items():
        if not given.has(name):
            continue
        value = given.take(name)
        try:
            imported.set(target, convert(value), shown(name))
        except (TypeError, ValueError):
            imported.decide(f"{shown(name)}={value}", f"not a value of {target}")


def printable(name: str, value: Any) -> Any:
    """The value, but of a credential: what is printed becomes a file."""
    return "..." if _SECRET.search(name) else value


def scalar(value: Any) -> Any:
    """Text of a command line as YAML reads it; other values as they are."""
    if not isinstance(value, str):
        return value
    try:
        return read_value(value)
    except yaml.YAMLError:
        return value


def whole(value: Any) -> int:
    """A whole number. Raises ``ValueError``, ``TypeError``."""
    number = scalar(value)
    if isinstance(number, bool) or int(number) != float(number):
        raise ValueError(value)
    return int(number)


def number(value: Any) -> float:
    """A number. Raises ``ValueError``, ``TypeError``."""
    found = scalar(value)
    if isinstance(found, bool):
        raise ValueError(value)
    return float(found)


def flag(value: Any) -> bool:
    """True or false. Raises ``ValueError``."""
    found = str(value).lower()
    if found not in ("true", "false"):
        raise ValueError(value)
    return found == "true"


def texts(value: Any) -> list[str]:
    """A text, or a list of them, as lists of paths are written. Raises ``ValueError``."""
    found = scalar(value)
    items = found if isinstance(found, list) else [found]
    if not items or not all(isinstance(item, str) for item in items):
        raise ValueError(value)
    return items


def text(value: Any) -> str:
    """A text. Raises ``ValueError``."""
    if not isinstance(value, str) or not value:
        raise ValueError(value)
    return value
