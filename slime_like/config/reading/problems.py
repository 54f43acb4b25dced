"""Validation errors as sentences: field, value and remedy."""

import re
from collections.abc import Collection, Sequence
from difflib import get_close_matches

from pydantic_core import ErrorDetails

from slime_like.config.base import CONFLICT
from slime_like.config.reading.fields import all_fields, sections, value_text
from slime_like.errors import Problem, field_of

_LONGEST_VALUE = 80
_SUBJECT = re.compile(r"^(?:Value error, |\w+ (?=should ))")
_RANGE = ("greater_than_equal", "greater_than", "less_than_equal", "less_than", "finite_number", "too_short")
_CODES = dict.fromkeys(_RANGE, "field-range") | {
    "value_error": "field-value",
    "string_pattern_mismatch": "field-value",
    "literal_error": "field-choice",
}
"""Code by pydantic's type of error; all others are ``field-type``."""
_WORDS = {"string": "text", "float": "number", "int": "integer", "bool": "true or false"}
_WORDS |= dict.fromkeys(("model", "dict"), "mapping") | dict.fromkeys(("list", "tuple"), "list")
"""Types by the first word of pydantic's type of error."""


def describe(details: Sequence[ErrorDetails]) -> list[Problem]:
    """Return pydantic's errors as ``field=value: problem; remedy``."""
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
        else:
            problems.append(Problem(*_fault(name, detail), name))
    return problems


def did_you_mean(name: str, known: Collection[str]) -> str:
    """Return ``did you mean X?``, or that the name is to be removed if no known name is near."""
    section, _, last = name.rpartition(".")
    if same := [field for field in known if section and field.startswith(section) and field.endswith(f".{last}")]:
        return f"did you mean {same[0]}?"
    leaf = get_close_matches(last, {field.rpartition(".")[2] for field in known}, n=1, cutoff=0.75)
    near = get_close_matches(name, known, n=1, cutoff=0.75) or [
        field for field in known if field.rpartition(".")[2] in leaf
    ]
    return f"did you mean {' or '.join(near)}?" if near else "remove it (slime-like train --help lists every field)"


def _fault(name: str, detail: ErrorDetails) -> tuple[str, str]:
    kind, field = detail["type"], all_fields().get(name)
    if kind == "missing":
        return "field-missing", f"{name} is missing; set it in the file" + (f" or with --{name}" if field else "")
    if kind in ("extra_forbidden", "invalid_key"):
        return "field-unknown", f"{name} is unknown; {did_you_mean(name, [*all_fields(), *sections()])}"
    code = _CODES.get(kind, "field-type")
    wrong = _SUBJECT.sub("", detail["msg"]).replace("should ", "must ", 1)
    if code == "field-type" and field is not None:
        remedy = "; write {name: value}, or remove it" if field.kind == "entries" else ""
        wrong = f"must be of type {field.type_text}{remedy}"
    elif code == "field-type" and (word := _WORDS.get(kind.partition("_")[0])):  # of a list's entry
        wrong = f"must be of type {word}"
    elif name in sections():
        wrong = "must be a section; write its fields below it"
    text = value_text(detail["input"]) or "''"
    return code, f"{name}={text[:_LONGEST_VALUE]}{'...' * (len(text) > _LONGEST_VALUE)} {wrong}"
