"""Base class of the configuration sections."""

import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Any, Self, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator, model_validator
from pydantic_core import PydanticCustomError

CONFLICT = "fields-conflict"
"""Pydantic's type, and our code, of errors about several fields."""

_MAX_NAME_BYTES, _MAX_PATH_BYTES = 255, 4000
_WORDS = {"true": True, "false": False}


class UnknownValue(Exception):
    """A field was read that has no valid value. Its own problem is reported already."""


def known(texts: Iterable[str]) -> Iterator[str]:
    """Yield texts until one depends on a field without a valid value."""
    with suppress(UnknownValue):
        yield from texts


def split_optional(annotation: Any) -> tuple[Any, bool]:
    """Return the annotation without ``None``, and whether it allows ``None``."""
    if get_origin(annotation) not in (Union, UnionType):
        return annotation, False
    rest = [part for part in get_args(annotation) if part is not type(None)]
    return (rest[0] if len(rest) == 1 else annotation), len(rest) < len(get_args(annotation))


def require_path(text: str) -> None:
    """Raise ``ValueError`` for text that cannot name a file. An empty path would mean the current directory."""
    if text == "":
        raise ValueError("is empty; give a path")
    encoded = os.fsencode(text)  # raises a ValueError for a lone surrogate
    if b"\0" in encoded:
        raise ValueError("contains a NUL character, which no path can have; remove it")
    if len(encoded) > _MAX_PATH_BYTES or any(len(name) > _MAX_NAME_BYTES for name in encoded.split(b"/")):
        raise ValueError(f"is longer than a path can be (names of {_MAX_NAME_BYTES} bytes); shorten it")


def absolute_code(name: str | None) -> str | None:
    """Make the path in ``path/to/file.py:name`` absolute and without ``..``.

    Processes in other directories find it, and a file has one name.
    """
    file, colon, attribute = (name or "").rpartition(":")
    if not colon or not file.endswith(".py"):
        return name
    path = Path(file).absolute()
    return f"{path.parent.resolve() / path.name if '..' in path.parts else path}:{attribute}"


def _path(value: Any) -> Any:
    if isinstance(value, str | Path):
        require_path(str(value))
    if not isinstance(value, str):
        return value
    path = Path(value)
    with suppress(RuntimeError):  # ``~name`` of an unknown user stays, as in a shell
        path = path.expanduser()
    return path.absolute()  # processes in other directories find it


def _differs(value: Any, default: Any) -> bool:
    """Compare two values. A field of a section that has no valid value does not count."""
    if not (isinstance(value, Section) and isinstance(default, Section)):
        return bool(value != default)
    fields = any(_differs(each, vars(default).get(key)) for key, each in vars(value).items())
    return fields or value.model_extra != default.model_extra


class Section(BaseModel):
    """Immutable section that rejects unknown keys and silent conversions.

    A field's description is in its line, or below it as a docstring.

    Words mean the same in YAML and in a flag: ``none`` for an optional field or an empty mapping, and ``true`` or
    ``false`` for a switch. A switch is not accepted as a number, nor a number as a switch.
    """

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=False, validate_default=True, protected_namespaces=(), allow_inf_nan=False
    )

    @field_validator("*", mode="before")
    @classmethod
    def _words(cls, value: Any, info: ValidationInfo) -> Any:
        annotation, optional = split_optional(cls.model_fields[info.field_name or ""].annotation)
        if isinstance(value, str) and value.lower() == "none" and (optional or get_origin(annotation) is dict):
            return None if optional else {}
        if annotation is bool:
            if not isinstance(value, bool) and not (isinstance(value, str) and value in _WORDS):
                raise ValueError("is neither true nor false; use one of these two")
            return value if isinstance(value, bool) else _WORDS[value]
        if value is False and "off" in get_args(annotation):
            return "off"  # YAML 1.1 reads `off` as a switch
        if any(each is False for each in get_args(annotation)):  # names, or switched off
            return False if value == "false" else str(value) if value == 0 and value is not False else value
        if isinstance(value, bool) and annotation in (int, float):
            raise ValueError("must be a number")
        if Path in (annotation, *get_args(annotation)):
            if isinstance(value, dict):
                return {key: _path(one) for key, one in value.items()}
            return [_path(one) for one in value] if isinstance(value, list | tuple) else _path(value)
        return value

    @property
    def all_changed(self) -> list[str]:
        """The fields that differ from their defaults, by name. A run's config.yaml contains defaults, too."""
        defaults = type(self).model_construct()
        return [key for key, value in sorted(self) if _differs(value, getattr(defaults, key))]

    @property
    def changed(self) -> str:
        """The first of these fields, or an empty text."""
        return next(iter(self.all_changed), "")

    def conflicts(self) -> Iterator[str]:
        """Yield combinations of fields that exclude each other. Each sentence starts with a field of this section."""
        return iter(())

    def all_conflicts(self) -> Iterator[str]:
        """Yield the conflicts of nested sections, too. Pydantic does not validate a ``model_copy``."""
        for name, value in self:
            if isinstance(value, Section):
                yield from (f"{name}.{text}" for text in value.all_conflicts())
        yield from known(self.conflicts())

    if not TYPE_CHECKING:  # so that mypy still knows the fields

        def __getattr__(self, name: str) -> Any:
            if name in type(self).model_fields:  # ``config.reading.partial`` removed it
                raise UnknownValue(name)
            return super().__getattr__(name)

    @model_validator(mode="after")
    def _consistent(self, info: ValidationInfo) -> Self:
        """Reject conflicts. With a context, the caller collects the conflicts of all sections."""
        if info.context is None and (found := list(self.conflicts())):
            raise PydanticCustomError(CONFLICT, "{conflicts}", {"conflicts": found})
        return self

    @model_validator(mode="before")
    @classmethod
    def _empty(cls, data: Any) -> Any:
        """Treat ``rollout:`` with nothing below it as the section's defaults."""
        return {} if data is None else data
