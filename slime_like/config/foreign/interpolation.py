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
    values = dict(_flat(data, ""))
    found = {name: _replaced(name, value, values, 0) for name, value in values.items()}
    return {name: value for name, value in found.items() if value not in (None, {}, [])}


def _flat(data: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in data.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{name}.")
        elif name != "_target_":
            yield f"{prefix}{name}", value


def _replaced(name: str, value: Any, values: Mapping[str, Any], depth: int) -> Any:
    """The value, with the values of what it names in the places of the references."""
    if isinstance(value, list):
        return [_replaced(name, each, values, depth) for each in value]
    if not isinstance(value, str) or depth == _DEEPEST:
        return value
    if (whole := _REFERENCE.fullmatch(value)) is not None:
        return _named(name, whole, values, depth)

    def text(found: re.Match[str]) -> str:
        inner = _named(name, found, values, depth)
        return found[0] if inner is None or isinstance(inner, list | Mapping) else str(inner)

    longer = _REFERENCE.sub(text, value)
    return longer if len(longer) <= _LONGEST else value


def _named(name: str, found: re.Match[str], values: Mapping[str, Any], depth: int) -> Any:
    """What a reference stands for in the setting ``name``; its own text where the file does not tell."""
    select, dots, target, default = found.groups()
    if dots:  # one is the section of the setting itself
        target = ".".join([*name.split(".")[: -len(dots)], target])
    if target in values:
        return _replaced(target, values[target], values, depth + 1)
    is_section = any(other.startswith(f"{target}.") for other in values)
    return scalar(default) if select and default is not None and not is_section else found[0]
