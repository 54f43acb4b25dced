"""The configuration as a flat list of dotted fields: what flags, help and the written reference are made from."""

import ast
import inspect
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from slime_like.config.base import split_optional
from slime_like.config.filling import AUTO, FILLING
from slime_like.config.run import RunConfig

Kind = Literal["text", "many", "entries", "sections"]


@dataclass(frozen=True, slots=True)
class Field:
    """One leaf of the configuration.

    Attributes:
        name: dotted name, e.g. ``trainer.parallel.tensor``.
        kind: "text" takes one value, "many" several, "entries" is a mapping of free keys, "sections" a list of
            sections, given as YAML text in a flag.
        item: type of the value, or of one of "many".
        default: ``PydanticUndefined`` where there is none.
    """

    name: str
    kind: Kind
    type_text: str
    item: Any
    optional: bool
    default: Any
    description: str

    @property
    def required(self) -> bool:
        return self.default is PydanticUndefined

    @property
    def default_text(self) -> str:
        return "required" if self.required else value_text(self.default)


@dataclass(frozen=True, slots=True)
class SectionDoc:
    """A section's dotted name ("" for the root), its description, and its leaves."""

    name: str
    description: str
    fields: tuple[Field, ...]


def value_text(value: Any) -> str:
    """A value as one writes it in YAML or in a flag."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, BaseModel):
        given = sorted(value.model_fields_set)  # a set: in another order in each process
        return "{" + ", ".join(f"{key}: {value_text(getattr(value, key))}" for key in given) + "}"
    if isinstance(value, tuple | list):
        return "[" + ", ".join(value_text(item) for item in value) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {value_text(item)}" for key, item in value.items()) + "}"
    return str(value)


def is_section(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def sections(model: type[BaseModel] = RunConfig, prefix: str = "", description: str = "") -> Iterator[SectionDoc]:
    """List the configuration's sections, outer before inner, in the order of the models."""
    leaves = []
    inner: list[tuple[type[BaseModel], str, str]] = []
    for key, info in model.model_fields.items():
        name = f"{prefix}{key}"
        text = info.description or _docstrings(model.__module__).get(f"{model.__name__}.{key}", "")
        if is_section(info.annotation):
            inner.append((info.annotation, f"{name}.", text))  # type: ignore[arg-type]
        else:
            leaves.append(_leaf(name, info, text))
    yield SectionDoc(prefix.rstrip("."), description, tuple(leaves))
    for section in inner:
        yield from sections(*section)


def all_fields() -> dict[str, Field]:
    """Return the leaves by dotted name."""
    return {field.name: field for section in _of_a_run() for field in section.fields}


def section_names() -> set[str]:
    return {section.name for section in _of_a_run()} - {""}


@cache
def _of_a_run() -> tuple[SectionDoc, ...]:
    return tuple(sections())


@cache
def _docstrings(module: str) -> dict[str, str]:
    """Docstrings below fields, by ``Section.field``. Pydantic's reader would slow down every import of the sections."""
    classes = [
        node for node in ast.parse(inspect.getsource(sys.modules[module])).body if isinstance(node, ast.ClassDef)
    ]
    return {
        f"{section.name}.{ast.unparse(field.target)}": " ".join(str(below.value.value).split())
        for section in classes
        for field, below in pairwise(section.body)
        if isinstance(field, ast.AnnAssign) and isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant)
    }


def _leaf(name: str, info: FieldInfo, description: str) -> Field:
    annotation, optional = split_optional(info.annotation)
    kind, item = _kind(annotation)
    default = info.get_default(call_default_factory=True, validated_data={})
    type_text = _type_text(annotation) + (" or none" if optional else f" or {AUTO}" if name in FILLING else "")
    return Field(name, kind, type_text, item, optional, default, description)


def _kind(annotation: Any) -> tuple[Kind, Any]:
    origin = get_origin(annotation)
    if origin is dict:
        return "entries", Any
    if origin is tuple:
        item = get_args(annotation)[0]
        return ("sections" if is_section(item) else "many"), item
    return "text", annotation


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
    if is_section(annotation):
        return "{" + ", ".join(annotation.model_fields) + "}"
    names = {str: "text", int: "integer", float: "number", bool: "true | false", Path: "path"}
    return names[annotation]
