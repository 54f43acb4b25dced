"""Validation errors as sentences: field, value and remedy."""

import re
from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any

from pydantic_core import ErrorDetails

from slime_like.config.base import CONFLICT
from slime_like.config.reading.fields import all_fields, is_section, section_names, value_text
from slime_like.errors import Problem, field_of

_LONGEST_VALUE = 80
_PYTHON_NAMES = re.compile(r"(?<!')\b(?:True|False|None)\b(?!')")  # names in quotes are text
_NO_SECTION = "is one value where a section belongs; write its fields below it"
_FAULTS = {
    "value_error": ("field-value", "{error}"),
    "greater_than_equal": ("field-range", "is out of range; it must be at least {ge}"),
    "greater_than": ("field-range", "is out of range; it must be above {gt}"),
    "less_than_equal": ("field-range", "is out of range; it must be at most {le}"),
    "less_than": ("field-range", "is out of range; it must be below {lt}"),
    "finite_number": ("field-range", "is not finite; give a finite number"),
    "too_short": ("field-range", "is too short; give at least {min_length}"),
    "literal_error": ("field-choice", "must be one of: {expected}"),
    "model_type": ("field-type", _NO_SECTION),
    "model_attributes_type": ("field-type", _NO_SECTION),
    "dict_type": ("field-type", "must be a mapping; write `key: value` pairs below it"),
    "string_pattern_mismatch": ("field-value", "must match {pattern}"),
    "tuple_type": ("field-type", "must be a list; write [first, second]"),
    "invalid_key": ("field-unknown", "is not the name of a field; remove it"),
}
"""Code and fault by pydantic's type of error."""


def describe(details: Sequence[ErrorDetails]) -> list[Problem]:
    """Return pydantic's errors as ``field=value: fault; remedy``."""
    problems = []
    for detail in details:
        location = detail["loc"]
        inside = [other for other in details if other["loc"][: len(location)] == location and other is not detail]
        if detail["type"] == "too_short" and inside:
            continue  # pydantic counts the faulty items as absent
        name = ".".join(str(part) for part in location)
        if detail["type"] == CONFLICT:
            texts = [f"{name}.{text}" if name else text for text in detail["ctx"]["conflicts"]]
            problems += [Problem(CONFLICT, text, field_of(text)) for text in texts]
            continue
        problems.append(Problem(*_fault(name, detail), name))
    return problems


def did_you_mean(name: str, known: Sequence[str]) -> str:
    """Return ``did you mean X?``, or where the names are listed if nothing is near."""
    leaf = get_close_matches(name.rpartition(".")[2], {field.rpartition(".")[2] for field in known}, n=1, cutoff=0.75)
    near = get_close_matches(name, known, n=1, cutoff=0.75) or [
        field for field in known if field.rpartition(".")[2] in leaf
    ]
    return f"did you mean {' or '.join(near)}?" if near else "remove it (slime-like train --help lists every field)"


def _fault(name: str, detail: ErrorDetails) -> tuple[str, str]:
    kind, value, context = detail["type"], detail["input"], detail.get("ctx", {})
    if kind == "missing":
        hint = f"; set it in the file or with --{name}" if name in all_fields() else "; add it"
        return "field-missing", f"{name} is missing{hint}"
    if kind == "extra_forbidden":
        return "field-unknown", f"{name} is unknown; {did_you_mean(name, _known(name))}"
    if kind in _FAULTS:
        code, wrong = _FAULTS[kind]
        if wrong is _NO_SECTION:
            fields = [field for field in all_fields() if field.startswith(f"{name}.")]
            wrong += "".join(f", e.g. `{field.removeprefix(f'{name}.')}: ...`" for field in fields[:1])
        wrong = wrong.format_map({key: _context_text(key, part) for key, part in context.items()})
    else:
        field = all_fields().get(name)
        expected = field.type_text if field is not None else detail["msg"].removeprefix("Input should be ")
        code, wrong = "field-type", f"must be of type {expected}"
    return code, f"{name}={_shown(value)} {wrong}"


def _context_text(key: str, value: Any) -> str:
    """Return a part of pydantic's context as one writes it in YAML; its choices have Python's names of values."""
    text = value_text(value)
    return _PYTHON_NAMES.sub(lambda found: found[0].lower(), text) if key == "expected" else text


def _known(name: str) -> list[str]:
    known = [*all_fields(), *section_names()]
    parts = name.split(".")
    for end, part in enumerate(parts):
        if part.isdigit():  # items of a list of sections have separate names
            annotation = all_fields()[".".join(parts[:end])].item
            prefix = ".".join(parts[: end + 1])
            return [f"{prefix}.{key}" for key in annotation.model_fields] if is_section(annotation) else known
    return known


def _shown(value: Any) -> str:
    text = value_text(value) if not isinstance(value, str) else value or "''"
    return text if len(text) <= _LONGEST_VALUE else f"{text[:_LONGEST_VALUE]}..."
