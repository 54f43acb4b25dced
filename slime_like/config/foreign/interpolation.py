"""Values of a YAML file whose texts name other settings of it, as OmegaConf writes references (``${data.path}/a``)."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from slime_like.config.foreign.values import scalar

_REFERENCE = re.compile(r"\$\{(?:(oc\.select):)?\s*(\.*)([\w.]+)\s*(?:,\s*([^{}]*))?\}")
_DEEPEST, _LONGEST = 10, 10_000
"""References that lead from one to the next, and characters of a value: what goes beyond stays as it is written."""


def interpolated(data: Mapping[str, Any]) -> dict[str, Any]:
    """All settings of a file by dotted name, without those that are empty.

    A reference that names no single setting of the file stays in its text.
    """
    references = _References(dict(_flat(data, "")))
    found = {name: references.value(name) for name in references.values}
    return {name: value for name, value in found.items() if value not in (None, {}, [])}


def _flat(data: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in data.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{name}.")
        elif name != "_target_":
            yield f"{prefix}{name}", value


class _References:
    """Values with what they name in the places of references; each is worked out once.

    Args:
        values: as they are written, by dotted name.
    """

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.values = values
        self._done: dict[str, Any] = {}
        self._open: list[str] = []

    def value(self, name: str) -> Any:
        """The setting's value; as it is written where its references lead back to it, or too deep."""
        if name in self._open or len(self._open) >= _DEEPEST:
            return self.values[name]
        if name not in self._done:
            self._open.append(name)
            self._done[name] = self._replaced(name, self.values[name])
            self._open.pop()
        return self._done[name]

    def _replaced(self, name: str, value: Any) -> Any:
        if isinstance(value, list):
            return [self._replaced(name, each) for each in value]
        if not isinstance(value, str):
            return value
        if (whole := _REFERENCE.fullmatch(value)) is not None:
            return self._named(name, whole)

        def text(found: re.Match[str]) -> str:
            inner = self._named(name, found)
            return found[0] if inner is None or isinstance(inner, list | Mapping) else str(inner)

        longer = _REFERENCE.sub(text, value)
        return longer if len(longer) <= _LONGEST else value

    def _named(self, name: str, found: re.Match[str]) -> Any:
        """What a reference in the setting ``name`` stands for; its own text where that is not in the file."""
        select, dots, target, default = found.groups()
        if dots:  # one is the section of the setting itself
            target = ".".join([*name.split(".")[: -len(dots)], target])
        if target in self.values:
            return self.value(target)
        is_section = any(other.startswith(f"{target}.") for other in self.values)
        return scalar(default) if select and default is not None and not is_section else found[0]
