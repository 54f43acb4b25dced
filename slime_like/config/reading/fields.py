"""The configuration as a flat list of dotted fields, for flags, help and the reference, and its errors as sentences."""

import ast
import inspect
import re
import sys
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from itertools import pairwise
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic_core import ErrorDetails, PydanticUndefined

from slime_like.config.base import CONFLICT, Part, split_optional
from slime_like.config.filling import AUTO, FILLING
from slime_like.config.run import RunConfig
from slime_like.errors import Problem, field_of

Kind = Literal["text", "many", "entries", "part", "sections"]


@dataclass(frozen=True, slots=True)
class Field:
    """One leaf of the configuration.

    Attributes:
        name: dotted name, e.g. ``trainer.parallel.tensor``.
        kind: "text" takes one value, "many" several. "entries" is a mapping of free keys, "part" a name with options,
            and "sections" a list of sections; a flag gives these as YAML.
        default: ``PydanticUndefined`` if there is none.
    """

    name: str
    kind: Kind
    type_text: str
    default: Any
    description: str

    @property
    def default_text(self) -> str | None:
        """The default as in YAML; ``None`` if the field is required."""
        return None if self.default is PydanticUndefined else value_text(self.default)


def value_text(value: Any) -> str:
    """Return a value as one writes it in YAML or in a flag."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Part) and not value.options:
        return value.name
    if isinstance(value, BaseModel):  # sorted, because the order of a set differs between processes
        value = {key: getattr(value, key) for key in sorted(value.model_fields_set)}
    if isinstance(value, tuple | list):
        return "[" + ", ".join(value_text(item) for item in value) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {value_text(item)}" for key, item in value.items()) + "}"
    return str(value)


@cache
def sections() -> dict[str, list[Field]]:
    """Return the leaves of every section by its dotted name, outer before inner. The root's name is ""."""
    return dict(_sections(RunConfig, ""))


@cache
def all_fields() -> dict[str, Field]:
    """Return the leaves by dotted name."""
    return {field.name: field for fields in sections().values() for field in fields}


def _sections(model: type[BaseModel], prefix: str) -> Iterator[tuple[str, list[Field]]]:
    leaves: list[Field] = []
    inner: list[tuple[Any, str]] = []
    for key, info in model.model_fields.items():
        if _is_section(info.annotation):
            inner.append((info.annotation, f"{prefix}{key}."))
            continue
        annotation, optional = split_optional(info.annotation)
        name, default = f"{prefix}{key}", info.get_default(call_default_factory=True, validated_data={})
        type_text = _type_text(annotation) + (" or none" if optional else f" or {AUTO}" if name in FILLING else "")
        below = (_docstrings(one.__module__).get(f"{one.__name__}.{key}") for one in model.__mro__[:2])
        description = info.description or next(filter(None, below), "")
        leaves.append(Field(name, _kind(annotation), type_text, default, description))
    yield prefix.rstrip("."), leaves
    for section in inner:
        yield from _sections(*section)


def _is_section(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel) and annotation is not Part


@cache
def _docstrings(module: str) -> dict[str, str]:
    """Return docstrings below fields by ``Section.field``. Pydantic's reader would slow down every import."""
    classes = [
        node for node in ast.parse(inspect.getsource(sys.modules[module])).body if isinstance(node, ast.ClassDef)
    ]
    return {
        f"{section.name}.{ast.unparse(field.target)}": " ".join(str(below.value.value).split())
        for section in classes
        for field, below in pairwise(section.body)
        if isinstance(field, ast.AnnAssign) and isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant)
    }


def _kind(annotation: Any) -> Kind:
    origin = get_origin(annotation)
    if annotation is Part:
        return "part"
    if origin is tuple:
        return "sections" if _is_section(get_args(annotation)[0]) else "many"
    return "entries" if origin is dict else "text"


def _type_text(annotation: Any) -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return " | ".join("false" if argument is False else str(argument) for argument in arguments)
    if origin in (Union, UnionType):
        return " | ".join(map(_type_text, arguments))
    if origin is dict:
        return "mapping"
    if origin is tuple:
        return f"list of {_type_text(arguments[0])}"
    if _is_section(annotation):
        return "{" + ", ".join(annotation.model_fields) + "}"
    names = {str: "text", int: "integer", float: "number", bool: "true | false", Path: "path", Part: "name or mapping"}
    return names[annotation]


_LONGEST_VALUE = 80
_SUBJECT = re.compile(r"^(?:Value error, |\w+ (?=should ))")
_RANGE = ("greater_than_equal", "greater_than", "less_than_equal", "less_than", "finite_number", "too_short")
_CODES = dict.fromkeys(_RANGE, "field-range") | {
    "value_error": "field-value",
    "string_pattern_mismatch": "field-value",
    "literal_error": "field-choice",
}
"""Code by pydantic's type of error; all others are ``field-type``."""


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
    elif name in sections():
        wrong = "must be a section; write its fields below it"
    text = value_text(detail["input"]) or "''"
    return code, f"{name}={text[:_LONGEST_VALUE]}{'...' * (len(text) > _LONGEST_VALUE)} {wrong}"
