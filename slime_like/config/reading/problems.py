"""Validation errors as sentences: field, value and remedy."""

import re
from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any

from pydantic import BaseModel
from pydantic_core import ErrorDetails

from slime_like.config.reading.fields import all_fields, is_section, section_names, value_text
from slime_like.config.reading.synonyms import ABSENT, SECTIONS, SEVERAL, SYNONYMS, VALUES
from slime_like.errors import Problem

FLAG = "--"
"""What stands before a field that a flag set."""

_LONGEST_VALUE = 80
_NAMED = re.compile(r"([a-z_][\w.]*)=")
_PYTHON_NAMES = re.compile(r"(?<!')\b(?:True|False|None)\b(?!')")  # those in quotes are text
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
    "invalid_key": (
        "field-unknown",
        "is not the name of a field; remove it (slime-like train --help lists every field)",
    ),
}
"""Code, and what is wrong, of pydantic's types of errors."""
_OTHERWISE = {"cluster.gpu": "; for another one set cluster.gpu_memory_gib"}
"""A second remedy, by field."""


def describe_all(details: Sequence[ErrorDetails], origins: dict[str, str]) -> list[Problem]:
    """Pydantic's errors as ``[where]field=value what is wrong; remedy``.

    Args:
        origins: what to print before a field: the file and line that set it, or the dashes of a flag.
    """
    problems = []
    for detail in details:
        location = detail["loc"]
        inside = [other for other in details if other["loc"][: len(location)] == location and other is not detail]
        if detail["type"] == "too_short" and inside:
            continue  # pydantic counts the faulty items as absent
        name = ".".join(str(part) for part in location)
        code, sentence = _fault(name, detail)
        problems.append(Problem(code, _place(name, detail, origins) + sentence, name))
    return problems


def did_you_mean(name: str, known: Sequence[str], flag: bool = False) -> str:
    """``did you mean X?``, or where to find the names when nothing is near."""
    if name in SECTIONS:
        return "verl uses this name; docs/coming_from.md lists the field here for each of verl's names"
    parts = name.replace("-", "_").split(".")
    if absent := ABSENT.get(".".join(parts[-2:]), ABSENT.get(parts[-1])):
        return absent
    if len(parts) == 1 and parts[0] in SEVERAL:
        return f"did you mean {SEVERAL[parts[0]]}?"
    near = suggestion(name, known)
    if near is None:
        return "remove it (slime-like train --help lists every field)"
    return f"did you mean {'--' if flag else ''}{near}?"


def suggestion(name: str, known: Sequence[str]) -> str | None:
    """The known name that an unknown one probably means."""
    name = name.replace("-", "_")
    parts = name.split(".")
    tail = ".".join(parts[-2:])
    if len(parts) > 1 and (synonym := SYNONYMS.get(tail)) in known:
        return synonym
    if len(parts) > 2 and tail in known:
        return tail
    leaf = name.rpartition(".")[2]
    # A section's name alone makes two fields of it alike.
    near = [
        field
        for field in get_close_matches(name, known, n=1, cutoff=0.75)
        if not leaf or get_close_matches(leaf, [field.rpartition(".")[2]], cutoff=0.5)
    ]
    elsewhere = [field for field in [SYNONYMS.get(leaf)] if field in known]
    same_leaf = [candidate for candidate in known if candidate.rpartition(".")[2] == leaf]
    leaves = {candidate.rpartition(".")[2]: candidate for candidate in known}
    near_leaf = [leaves[match] for match in get_close_matches(leaf, list(leaves), n=1, cutoff=0.75)]
    candidates = [*(same_leaf if len(same_leaf) == 1 else []), *elsewhere, *near, *near_leaf]
    return candidates[0] if candidates else None


def meant_value(value: str, known: Sequence[str]) -> str:
    """``; did you mean X?`` where another project calls X ``value``, or ""."""
    meant = VALUES.get(value)
    return f"; did you mean {meant}?" if meant in known else ""


def conflicting_fields(detail: ErrorDetails) -> list[str]:
    """Fields of a section that do not go together; empty for any other error."""
    if detail["type"] != "value_error" or not _is_section_value(detail["input"]):
        return []
    return _NAMED.findall(str(detail["ctx"]["error"]).partition(";")[0])


def _place(name: str, detail: ErrorDetails, origins: dict[str, str]) -> str:
    """What to print before the sentence. Where it is about several fields of a section: where the first of them was
    given that a flag gave, or else the first that the file has."""
    named = [f"{name}.{field}" if name else field for field in conflicting_fields(detail)]
    given = [field for field in named if field in origins]
    flag = next((field for field in given if origins[field] == FLAG), None)
    if flag is not None:
        return FLAG if flag == named[0] else f"{FLAG}{flag}: "
    return _origin(given[0] if given else name, origins)


def _origin(name: str, origins: dict[str, str]) -> str:
    """The key itself, or the nearest one above it that is written somewhere."""
    while name:
        if name in origins:
            return origins[name]
        name = name.rpartition(".")[0]
    return ""


def _fault(name: str, detail: ErrorDetails) -> tuple[str, str]:
    kind, value, context = detail["type"], detail["input"], detail.get("ctx", {})
    if kind == "missing":
        hint = f"; set it in the file or with --{name}" if name in all_fields() else "; add it"
        return "field-missing", f"{name} is missing{hint}"
    if kind == "extra_forbidden":
        return "field-unknown", f"{name} is unknown; {did_you_mean(name, _known(name))}"
    if kind == "value_error" and _is_section_value(value):  # the sentence begins with a field of the section
        return "fields-conflict", f"{name}.{context['error']}" if name else str(context["error"])
    if kind in _FAULTS:
        code, wrong = _FAULTS[kind]
        wrong += _OTHERWISE.get(name, "")
        wrong += meant_value(str(value), re.findall(r"'(.+?)'", context.get("expected", "")))
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
    """A part of pydantic's context, as one writes it in YAML. Choices are one text, with Python's names of values."""
    text = value_text(value)
    return _PYTHON_NAMES.sub(lambda found: found[0].lower(), text) if key == "expected" else text


def _is_section_value(value: Any) -> bool:
    return isinstance(value, dict | BaseModel)


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
