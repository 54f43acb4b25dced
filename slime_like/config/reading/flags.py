"""Command-line flags that mirror the YAML file, written into its data before validation."""

import json
from collections.abc import Sequence
from typing import Any

import yaml

from slime_like.config.reading.fields import Field, all_fields, section_names
from slime_like.config.reading.problems import FLAG, did_you_mean
from slime_like.config.reading.yaml_text import read_value
from slime_like.errors import Problem


def read_flags(arguments: Sequence[str], data: dict[str, Any], origins: dict[str, str]) -> list[Problem]:
    """Write every flag into ``data`` and note in ``origins`` that the value came from it; returns the problems."""
    fields = all_fields()
    problems: list[Problem] = []
    for name, values in _split(arguments, problems):
        field, entry = _find(name, fields)
        if field is None:
            problems.append(_unknown(name, fields))
            continue
        path = field.name.split(".") + entry
        try:
            value = _value(field, values, bool(entry))
            _set(data, path, value)
        except ValueError as error:
            problems.append(Problem("flag-value", f"--{name}: {error}", field.name))
            continue
        for key in [key for key in origins if key == field.name or key.startswith(f"{field.name}.")]:
            del origins[key]
        origins[field.name] = FLAG
    return problems


def sets_field(flag: str) -> bool:
    """Whether ``--name`` or ``--name=value`` sets a field, or an entry of one."""
    return _find(flag.removeprefix("--").partition("=")[0], all_fields())[0] is not None


def _split(arguments: Sequence[str], problems: list[Problem]) -> list[tuple[str, list[str]]]:
    """``--name=value`` and ``--name value ...``, in order; every value stays text."""
    flags: list[tuple[str, list[str]]] = []
    for argument in arguments:
        if argument.startswith("--"):
            name, equals, value = argument[2:].partition("=")
            flags.append((name, [value] if equals else []))
        elif flags:
            flags[-1][1].append(argument)
        else:
            problems.append(Problem("flag-missing", f"{argument!r} is not a flag; write --section.field value"))
    return flags


def _find(name: str, fields: dict[str, Field]) -> tuple[Field | None, list[str]]:
    """The field a flag sets, with dashes for underscores or without, and the keys below it if it is a mapping."""
    if field := fields.get(name.replace("-", "_")):
        return field, []
    for field in fields.values():
        depth = field.name.count(".") + 1
        parts = name.split(".")
        if field.kind == "entries" and ".".join(parts[:depth]).replace("-", "_") == field.name and all(parts[depth:]):
            return field, parts[depth:]
    return None, []


def _value(field: Field, values: list[str], is_entry: bool) -> Any:
    if not values:
        raise ValueError(f"the value is missing; give one of type {field.type_text}")
    if field.kind == "many" and not is_entry:
        return _many(field, values)
    if len(values) > 1:
        given = " ".join(values)
        raise ValueError(f"takes one value, got {len(values)} ({given}); quote it, and put the file before all flags")
    if field.kind == "text":
        return values[0]
    try:
        value = read_value(values[0])
    except yaml.YAMLError as error:
        remedy = f"correct it, or write '{json.dumps(values[0])}' if text is meant" if is_entry else "correct it"
        raise ValueError(f"{values[0]!r} is not valid YAML ({getattr(error, 'problem', error)}); {remedy}") from error
    if field.kind == "sections" and not is_entry and isinstance(value, str):
        first = next(iter(field.item.model_fields))
        raise ValueError(f"{value!r} is not a list of sections; write '[{{{first}: {value}}}]'")
    return value


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


def _set(data: dict[str, Any], path: list[str], value: Any) -> None:
    for key in path[:-1]:
        data = data.setdefault(key, {})
        if not isinstance(data, dict):
            raise ValueError(f"{path[0]} is one value where a section belongs; correct the configuration file")
    data[path[-1]] = value


def _unknown(name: str, fields: dict[str, Field]) -> Problem:
    if name in section_names():
        inside = [field for field in fields if field.startswith(f"{name}.")]
        return Problem("flag-section", f"--{name} is a section; set its fields, e.g. --{inside[0]}", name)
    for field in fields.values():
        if field.kind == "sections" and name.startswith(f"{field.name}."):
            remedy = f"give the whole list as YAML: --{field.name} '[{{...}}]'"
            return Problem("flag-section", f"--{name} cannot be set alone; {remedy}", name)
    return Problem("field-unknown", f"--{name} is unknown; {did_you_mean(name, list(fields), flag=True)}", name)
