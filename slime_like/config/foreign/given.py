"""Settings as a file gives them, and rules that read them: a rule whose settings are not all known sets nothing.

With a value stands what it depends on beside the file: variables that a script takes from outside, and arguments that
are added when it runs, where they may hold a setting that the file does not have.
"""

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from slime_like.config.foreign.imported import UNKNOWN_VALUE, Imported
from slime_like.config.foreign.launch_script import Argument
from slime_like.system.credentials import without_credentials


class NotKnownError(Exception):
    """A rule needs a setting, given as the message, that is not known."""


@dataclass(slots=True)
class Given:
    """Settings of a source by name.

    Attributes:
        values: of each setting that the file has.
        unknown: settings that the file has, with a value that is not in it.
        defaults: the source's own, where the file has none.
        prefix, between: what stands before a name there, and between it and its value.
        chosen: of a setting, the variables whose defaults its value has.
        further: arguments that are known only when the script runs.
        is_based: whether another file, of which nothing is known, has the settings that this one does not.
    """

    values: Mapping[str, Any]
    unknown: frozenset[str] = frozenset()
    defaults: Mapping[str, Any] = field(default_factory=dict)
    prefix: str = ""
    between: str = "="
    chosen: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    further: tuple[str, ...] = ()
    is_based: bool = False
    _read: set[str] = field(default_factory=set)
    _absent: set[str] = field(default_factory=set)
    _done: set[str] = field(default_factory=set)
    _skips_unknown: bool = False

    def get(self, name: str, default: Any = None) -> Any:
        """The value given; ``default`` where there is none.

        Raises:
            NotKnownError: there is one, which is not known, or another file may have one.
        """
        if not self.has(name):
            return default
        self._read.add(name)
        if name in self.unknown and self._skips_unknown:
            return default
        if name in self.unknown:
            raise NotKnownError(name)
        return self.values[name] if name in self.values else self.defaults[name]

    def has(self, name: str) -> bool:
        """Whether there is a value, known or not.

        Raises:
            NotKnownError: this file has none, and another one may.
        """
        if self._is_there(name):
            return True
        self._absent.add(name)
        if self.is_based and not self._skips_unknown:
            raise NotKnownError(name)
        return False

    def _is_there(self, name: str) -> bool:
        return self.values.get(name) is not None or (name in self.defaults and not self.is_based)

    def note(self, name: str) -> bool:
        """Whether there is a switch; it counts as read.

        Raises:
            NotKnownError: it may be there, or another file may have it.
        """
        self._read.update({name} & self.values.keys())
        if name in self.unknown and not self._skips_unknown:
            raise NotKnownError(name)
        return self.has(name)

    def setting(self, name: str) -> str:
        """The setting as the file has it, without credentials."""
        value = without_credentials(name, self.values.get(name, self.defaults.get(name)))
        return f"{self.prefix}{name}" + ("" if value == "" else f"{self.between}{value}")

    def origin(self, name: str) -> str:
        """What names the setting, and whether its value is the source's default."""
        return f"{self.prefix}{name}" + ("" if name in self.values else ", its default")

    def _conditions(self, read: Iterable[str], absent: Iterable[str]) -> str:
        """On what else, beside settings of the file, a value depends."""
        variables = dict.fromkeys(f"${name}" for each in sorted(read) for name in self.chosen.get(each, ()))
        parts = [f"{variable} is not set" for variable in variables]
        if self.further and any(absent):
            parts.append(f"{' or '.join(self.further)} has no other")
        return f", if {' and '.join(parts)}" if parts else ""

    def unused(self, imported: Imported, why: str, *names: str) -> None:
        """List settings that have no effect there, whatever their values are."""
        for name in filter(self.values.__contains__, names):
            self._read.add(name)
            imported.needless[self.setting(name)] = why

    def apply(self, imported: Imported, targets: str, rule: "Rule") -> None:
        """Take over what a rule sets, if all settings that it asks for are known and of their kinds.

        Args:
            targets: fields here that the rule decides; named where it cannot.
        """
        self._read.clear()
        self._absent.clear()
        draft = Imported(imported.source)
        try:
            rule(self, draft)
        except NotKnownError as missing:
            why = f"depends on {self.prefix}{missing}, {self._cause(str(missing))}"
        except (TypeError, ValueError) as error:
            why = f"cannot be taken over ({error})"
        else:
            self._done |= self._read
            absent = self._absent | {name for name in self._read if name not in self.values}
            if draft.open_points:
                draft.leave(targets)
            imported.add(draft, self._conditions(self._read, absent))
            return
        self._read_on(rule)
        read = sorted(name for name in self._read - self.unknown - self._done if name in self.values)
        imported.decide(targets, why + "".join(f", {self.setting(name)}" for name in read))

    def _cause(self, missing: str) -> str:
        return "whose value is not in the file" if missing in self.values else "which another file may set"

    def _read_on(self, rule: "Rule") -> None:
        """Note what the rule reads beside the setting that ended it."""
        self._skips_unknown = True
        with suppress(TypeError, ValueError, NotKnownError):
            rule(self, Imported(""))
        self._skips_unknown = False

    def take_direct(self, imported: Imported, direct: "Mapping[str, tuple[str, Callable[[Any], Any]]]") -> None:
        """Take over all settings that are one field here."""
        for name, (target, convert) in direct.items():
            if not self._is_there(name) or name in self.unknown:
                continue
            self._done.add(name)
            conditions = self._conditions([name], [name] * (name not in self.values))
            try:
                imported.set(target, convert(self.get(name)), self.origin(name) + conditions)
            except (TypeError, ValueError):
                imported.decide(self.setting(name), f"no value of that field; set {target}")

    def take_switches(self, imported: Imported, switches: Mapping[str, tuple[str, Any]]) -> None:
        """Take over what is there without a value."""
        for name in switches:
            if name not in self.values or name in self.unknown:
                continue
            self._done.add(name)
            imported.set(*switches[name], self.origin(name))

    def close(self, imported: Imported, fields: Mapping[str, str]) -> Iterable[str]:
        """List what was read and is nowhere named, and what is not known; return the names that nothing has read.

        Args:
            fields: of names that are one field here, that field.
        """
        for name in filter(self.values.__contains__, sorted(self._done - self.unknown)):
            if not imported.mentions(f"{self.prefix}{name}"):
                imported.needless[self.setting(name)] = "read together with others"
        for name in filter(self.unknown.__contains__, self.values):
            if name not in self._done:
                remedy = f"; set {fields[name]}" if name in fields else ""
                imported.decide(self.setting(name), UNKNOWN_VALUE + remedy)
        rest = (name for name in self.values if name not in self._done | self.unknown)
        return [name for name in rest if not imported.mentions(f"{self.prefix}{name}")]


def given_by_words(found: Iterable[tuple[str, Argument]], defaults: Mapping[str, Any], **source: Any) -> Given:
    """Settings of a command line: of one that stands there several times the last counts.

    Args:
        found: name and value in order; what may not be passed stands beside what is passed before it.
        defaults: the source's own.
        source: other attributes of ``Given``.
    """
    values, unknown, chosen = dict[str, str](), set[str](), dict[str, tuple[str, ...]]()
    for name, argument in found:
        if argument.known:
            unknown.discard(name)
            values[name] = argument.text
        else:
            unknown.add(name)
            values[name] = f"{values[name]} or {argument.text}" if name in values else argument.text
        chosen[name] = argument.defaults
    return Given(values, frozenset(unknown), defaults, chosen=chosen, **source)


Rule = Callable[[Given, Imported], None]
