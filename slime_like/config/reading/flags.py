"""Command-line flags that mirror the YAML file, written into its data before validation."""

import json
from collections.abc import Sequence
from typing import Any

import yaml

from slime_like.config.reading.fields import Field, all_fields, section_names
from slime_like.config.reading.problems import FLAG, did_you_mean
from slime_like.config.reading.yaml_text import read_value


def read_flags(arguments: Sequence[str], data: dict[str, Any], origins: dict[str, str]) -> list[str]:
    """Write every flag into ``data`` and note in ``origins`` that the value came from it; returns the problems."""
    fields, known_sections = all_fields(), section_names()
    problems: list[str] = []
    for name, values in _split(arguments, problems):
        field, entry = _find(name, fields)
        if field is None:
            problems.append(_unknown(name, fields, known_sections))
            continue
        try:
            value = _value(field, values, entry is not None)
        except ValueError as error:
            problems.append(f"--{name}: {error}")
            continue
        path = field.name.split(".") + (entry or [])
        if not _set(data, path, value):
            problems.append(f"--{name}: {path[0]} is one value where a section belongs; correct the configuration file")
        for key in [key for key in origins if key == field.name or key.startswith(f"{field.name}.")]:
            del origins[key]
        origins[field.name] = FLAG
    return problems


def _split(arguments: Sequence[str], problems: list[str]) -> list[tuple[str, list[str]]]:
    """``--name=value`` and ``--name value ...``, in order; every value stays text."""
    flags: list[tuple[str, list[str]]] = []
    for argument in arguments:
        if argument.startswith("--"):
            name, equals, value = argument[2:].partition("=")
            flags.append((name, [value] if equals else []))
        elif flags:
            flags[-1][1].append(argument)
        else:
            problems.append(f"{argument!r} is not a flag; write --section.field value")
    return flags


def _find(name: str, fields: dict[str, Field]) -> tuple[Field | None, list[str] | None]:
    """The field a flag sets, and the keys below it where the field is a mapping."""
    if name in fields:
        return fields[name], None
    for field in fields.values():
        if field.kind == "entries" and name.startswith(f"{field.name}."):
            keys = name[len(field.name) + 1 :].split(".")
            return (field, keys) if all(keys) else (None, None)
    return None, None


def _value(field: Field, values: list[str], is_entry: bool) -> Any:
    if not values:
        raise ValueError(f"has no value; give {field.type_text}")
    if field.kind == "many" and not is_entry:
        return _many(field, values)
    if len(values) > 1:
        given = " ".join(values)
        raise ValueError(
            f"takes one value and got {len(values)} ({given}); quote it, and put the file before all flags"
        )
    if field.kind == "text":
        return values[0]
    try:
        return read_value(values[0])
    except yaml.YAMLError as error:
        remedy = f"correct it, or write '{json.dumps(values[0])}' if text is meant" if is_entry else "correct it"
        raise ValueError(f"{values[0]!r} is not valid YAML ({getattr(error, 'problem', error)}); {remedy}") from error


def _many(field: Field, values: list[str]) -> list[Any]:
    """Several values; ``[a, b]`` in one argument means the same, and ``none`` or ``[]`` is the empty list."""
    if len(values) > 1 or not (values[0].lower() == "none" or values[0].startswith("[")):
        return list(values)
    if values[0].lower() == "none":
        return []
    try:
        parsed = read_value(values[0])
    except yaml.YAMLError as error:
        raise ValueError(f"{values[0]!r} is not a valid list; give the values one after the other") from error
    return parsed if isinstance(parsed, list) else list(values)


def _set(data: dict[str, Any], path: list[str], value: Any) -> bool:
    for key in path[:-1]:
        data = data.setdefault(key, {})
        if not isinstance(data, dict):
            return False
    data[path[-1]] = value
    return True


def _unknown(name: str, fields: dict[str, Field], known_sections: set[str]) -> str:
    if name in known_sections:
        inside = [field for field in fields if field.startswith(f"{name}.")]
        return f"--{name} is a section; set its fields, e.g. --{inside[0]}"
    for field in fields.values():
        if field.kind == "sections" and name.startswith(f"{field.name}."):
            return f"--{name} cannot be set alone; give the whole list as YAML: --{field.name} '[{{...}}]'"
    return f"--{name} is unknown; {did_you_mean(name, list(fields), flag=True)}"
