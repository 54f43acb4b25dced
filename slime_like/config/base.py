"""Base class of the configuration sections, and the section of a component that settings choose by name."""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Any, Self, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, ValidationError, ValidationInfo, field_validator, model_validator
from pydantic_core import PydanticCustomError

CONFLICT = "fields-conflict"
"""Pydantic's type, and our code, of errors about several fields."""

_MAX_NAME_BYTES, _MAX_PATH_BYTES = 255, 4000
_WORDS = {"true": True, "false": False}

T = TypeVar("T")


class UnknownValue(Exception):
    """A field was read that has no valid value. Its own problem is reported already."""


def until_invalid(problems: Callable[..., Iterable[T]], *arguments: Any) -> Iterator[T]:
    """Yield what the function returns, until it reads a field without a valid value."""
    with suppress(UnknownValue):
        yield from problems(*arguments)


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
        return [key for key, value in sorted(self) if value != getattr(defaults, key)]

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
        yield from until_invalid(self.conflicts)

    if not TYPE_CHECKING:  # so that mypy still knows the fields

        def __getattr__(self, name: str) -> Any:
            if name in type(self).model_fields:  # removed by ``without``
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

    @model_validator(mode="wrap")
    @classmethod
    def _partial(cls, data: Any, handler: Callable[[Any], Self], info: ValidationInfo) -> Self:
        """With a context, leave out the values of fields at fault. To read one then raises ``UnknownValue``.

        An unknown key may be meant for any field of the section, so the section as a whole is at fault.
        """
        try:
            return handler(data)
        except ValidationError as error:
            faulty = {str(detail["loc"][0]) if detail["loc"] else "" for detail in error.errors()}
            given = {} if data is None else data
            if info.context is None or not isinstance(given, dict) or not faulty <= cls.model_fields.keys():
                raise
        required = {key: field.annotation for key, field in cls.model_fields.items() if field.is_required()}
        stand_ins = {key: {} if hasattr(of, "model_fields") else "-" for key, of in required.items() if key in faulty}
        return handler({key: given[key] for key in given.keys() - faulty} | stand_ins).without(*faulty)

    def without(self, *names: str) -> Self:
        """Return a copy without values of these fields, which count as set. Below a field, names are dotted."""
        copy = self.model_copy()
        for key, _, rest in (name.replace("[", ".").partition(".") for name in names):
            copy.model_fields_set.add(key)
            below = vars(copy).pop(key, None)
            if rest and isinstance(below, Section):
                vars(copy)[key] = below.without(rest)
        return copy


class Part(Section):
    """A built-in component or custom code. A name alone means all default options.

    In YAML, ``loss: gspo`` or ``loss: {name: gspo, clip_low: 3.0e-4}``; as flags, ``--algorithm.loss.clip_low 3e-4``.
    """

    model_config = ConfigDict(extra="allow")

    name: str

    @model_validator(mode="before")
    @classmethod
    def _from_name(cls, data: Any) -> Any:
        if isinstance(data, str):
            return {"name": data}
        if isinstance(data, Mapping):
            return {key: None if value == "none" else value for key, value in data.items()}
        return data

    _absolute = field_validator("name")(absolute_code)

    @property
    def options(self) -> dict[str, Any]:
        """Options that were set, by name."""
        return dict(self.model_extra or {})

    def __str__(self) -> str:
        return self.name
