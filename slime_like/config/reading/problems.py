"""Validation errors as sentences: field, value and remedy."""

import re
from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any

from pydantic import BaseModel
from pydantic_core import ErrorDetails

from slime_like.config.reading.fields import all_fields, is_section, section_names, value_text

FLAG = "--"
"""What stands before a field that a flag set."""

_LONGEST_VALUE = 80
_NAMED = re.compile(r"([a-z_][\w.]*)=")


def describe_all(details: Sequence[ErrorDetails], origins: dict[str, str]) -> list[str]:
    """Pydantic's errors as ``[where]field=value what is wrong; remedy``.

    Args:
        origins: what to print before a field: the file and line that set it, or the dashes of a flag.
    """
    sentences = []
    for detail in details:
        location = detail["loc"]
        inside = [other for other in details if other["loc"][: len(location)] == location and other is not detail]
        if detail["type"] == "too_short" and inside:
            continue  # pydantic counts the faulty items as absent
        name = ".".join(str(part) for part in location)
        sentences.append(_place(name, detail, origins) + _sentence(name, detail))
    return sentences


def did_you_mean(name: str, known: Sequence[str], flag: bool = False) -> str:
    """``did you mean X?``, or where to find the names when nothing is near."""
    near = get_close_matches(name, known, n=1, cutoff=0.75)
    leaf = name.rpartition(".")[2]
    same_leaf = [candidate for candidate in known if candidate.rpartition(".")[2] == leaf]
    leaves = {candidate.rpartition(".")[2]: candidate for candidate in known}
    near_leaf = [leaves[match] for match in get_close_matches(leaf, list(leaves), n=1, cutoff=0.75)]
    for candidates in (same_leaf if len(same_leaf) == 1 else [], near, near_leaf):
        if candidates:
            return f"did you mean {'--' if flag else ''}{candidates[0]}?"
    return "remove it (slime-like train --help lists every field)"


def _place(name: str, detail: ErrorDetails, origins: dict[str, str]) -> str:
    """What to print before the sentence. Where it is about several fields of a section: where the first of them was
    given that a flag gave, or else the first that the file has."""
    if detail["type"] != "value_error" or not _is_section_value(detail["input"]):
        return _origin(name, origins)
    problem = str(detail["ctx"]["error"]).partition(";")[0]
    named = [f"{name}.{field}" if name else field for field in _NAMED.findall(problem)]
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


def _sentence(name: str, detail: ErrorDetails) -> str:
    kind, value = detail["type"], detail["input"]
    if kind == "missing":
        hint = f"; set it in the file or with --{name}" if name in all_fields() else "; add it"
        return f"{name} is missing{hint}"
    if kind == "extra_forbidden":
        return f"{name} is unknown; {did_you_mean(name, _known(name))}"
    if kind == "value_error":
        text = str(detail["ctx"]["error"])
        return _validator_sentence(name, value, text)
    return f"{name}={_shown(value)} {_wrong(name, detail)}"


def _validator_sentence(name: str, value: Any, text: str) -> str:
    """A validator of one field says what is wrong with it; one of a whole section begins with a field's name."""
    if _is_section_value(value):
        return f"{name}.{text}" if name else text
    return f"{name}={_shown(value)} {text}"


def _is_section_value(value: Any) -> bool:
    return isinstance(value, dict | BaseModel)


def _wrong(name: str, detail: ErrorDetails) -> str:
    context: dict[str, Any] = dict(detail.get("ctx") or {})
    kind = detail["type"]
    bounds = {"greater_than_equal": "ge", "greater_than": "gt", "less_than_equal": "le", "less_than": "lt"}
    words = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}
    if kind in bounds:
        return f"is out of range; it must be {words[bounds[kind]]} {value_text(context[bounds[kind]])}"
    if kind == "finite_number":
        return "is not finite; give a finite number"
    if kind == "literal_error":
        return f"must be one of: {context['expected']}"
    if kind == "too_short":
        return f"is too short; give at least {context['min_length']}"
    if kind in ("model_type", "model_attributes_type"):
        return "is one value where a section belongs; write its fields below it"
    if kind == "dict_type":
        return "must be a mapping; write `key: value` pairs below it"
    if kind == "invalid_key":
        return "is not the name of a field; remove it (slime-like train --help lists every field)"
    if kind == "tuple_type":
        return "must be a list; write [first, second]"
    field = all_fields().get(name)
    expected = field.type_text if field is not None else detail["msg"].removeprefix("Input should be ")
    return f"has the wrong type; give {expected}"


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
