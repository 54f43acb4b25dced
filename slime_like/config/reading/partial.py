"""The rest of a configuration with faults, for checks that find its other faults."""

from collections.abc import Collection, Iterator, Sequence
from typing import Any

from pydantic import ValidationError

from slime_like.config.base import CONFLICT, Section
from slime_like.config.reading.fields import all_fields
from slime_like.config.reading.problems import near_names
from slime_like.config.run import RunConfig
from slime_like.errors import Problem


def faulty_fields(problems: Sequence[Problem]) -> Iterator[str]:
    """Yield the names of fields and unknown keys whose values are not known, because of these problems.

    An unknown key may be meant for a field with a similar name.
    """
    for problem in problems:
        if problem.code != CONFLICT and problem.field:
            yield problem.field
        if problem.code == "field-unknown":
            yield from near_names(problem.field)


def partial(data: dict[str, Any], names: Collection[str]) -> RunConfig | None:
    """Return the configuration without the values of these fields. To read one raises ``UnknownValue``.

    Conflicts are not rejected. Without a configuration that is otherwise valid, the result is ``None``.
    """
    unknown = sorted({_leaf(name) for name in names})
    for name in unknown:
        if (section := _section(data, name)) is not None:
            section.pop(name.rpartition(".")[2], None)
    for name in (field.name for field in all_fields().values() if field.default_text is None):
        if (section := _section(data, name)) is not None:
            section.setdefault(name.rpartition(".")[2], "unknown")
    try:
        config = RunConfig.model_validate(data, context={"collects": CONFLICT})
    except ValidationError:
        return None
    for name in unknown:
        config = _lacking(config, name)
    return config


def _leaf(name: str) -> str:
    """Return the field that contains what is at fault, e.g. ``reward.functions`` for ``reward.functions.0.name``."""
    keys = name.replace("[", ".").split(".")
    prefixes = (".".join(keys[: end + 1]) for end in range(len(keys)))
    return next((prefix for prefix in prefixes if prefix in all_fields()), name)


def _section(data: dict[str, Any], name: str) -> dict[str, Any] | None:
    """Return the values next to the field ``name``, or ``None`` if something else is there."""
    for key in name.split(".")[:-1]:
        if data.get(key) is None:
            data[key] = {}
        data = data[key]
        if not isinstance(data, dict):
            return None
    return data


def _lacking(section: Any, name: str) -> Any:
    """Return a copy of the section without the value of one field, which counts as set."""
    copy, (key, _, rest) = section.model_copy(), name.partition(".")
    if not rest:
        vars(copy).pop(key, None)
        copy.model_fields_set.add(key)
    elif isinstance(below := vars(copy).get(key), Section):
        vars(copy)[key] = _lacking(below, rest)
    return copy
