"""A module with the names of ``transformer_engine_torch``, read from the sources of its bindings.

The compiled extension needs CUDA's compiler and a GPU. This module has the same enums with the same values, and the
same functions with the same parameters. A function checks its arguments as the bindings would, and computes if
``tests.te.kernels`` has a version for a CPU. Any other call raises ``NotImplementedError`` with the function's name.
"""

import enum
import inspect
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, SupportsFloat, SupportsIndex

from torch import Tensor

from tests.te import kernels

SOURCES = Path(sys.prefix) / "transformer_engine_torch"
"""The unpacked sources, where ``scripts/test_te.sh`` puts them."""

VERSIONS = {"get_cudnn_version": 92000, "get_cublasLt_version": 130100, "get_num_cublas_streams": 4}
"""Answers of the libraries that are not there."""

_ENUM = re.compile(
    r"enum_<[\w:]+>\(\s*m,\s*\"(\w+)\"[^;]*?\)((?:[\s\\]*\.value\(.*?\))+?)[\s\\]*[;.](?!value)", re.DOTALL
)
_C_ENUM = re.compile(r"enum (?:class )?\w*\s*(?::\s*\w+\s*)?\{(.*?)\}", re.DOTALL)
_CLASS = re.compile(r"class_<[^;]*?>\(\s*m,\s*\"(\w+)\"", re.DOTALL)
_DEFINITION = re.compile(r"\bm\.def\(\s*\\?\s*\"(\w+)\"(.*?)\);", re.DOTALL)
_ARGUMENT = re.compile(r"py::arg\(\"(\w+)\"\)(?:\s*=\s*([\w:.]+))?")
_COMMENT = re.compile(r"/\*.*?\*/|//[^\n]*", re.DOTALL)
_DEFAULTS = {"nullptr": None, "py::none": None, "std::nullopt": None, "false": False, "true": True}

_TYPES: dict[str, type] = {"bool": bool, "float": SupportsFloat, "at::Tensor": Tensor, "std::string": str}
_TYPES |= dict.fromkeys(("size_t", "int", "int64_t"), SupportsIndex)


def install() -> ModuleType:
    """Put the module where Transformer Engine imports its extension from."""
    made = ModuleType("transformer_engine_torch")
    headers, bindings = (
        "\n".join(_COMMENT.sub("", path.read_text()) for path in sorted(SOURCES.rglob(kind)))
        for kind in ("*.h", "*.cpp")
    )
    values = _c_values(headers)
    for name, block in _ENUM.findall(headers + bindings):
        members = re.findall(r"\.value\(\s*\"(\w+)\"", block)
        found = {member: values.get(member, place) for place, member in enumerate(members)}
        setattr(made, name, enum.IntEnum(name, found))
    for name in _CLASS.findall(headers + bindings):
        setattr(made, name, type(name, (), {}))
    for name, definition in _DEFINITION.findall(headers + bindings):
        kernel = kernels.KERNELS.get(name)
        setattr(made, name, _checked(name, _signature(definition, headers), kernel) if kernel else _absent(name))
    for name, version in VERSIONS.items():
        setattr(made, name, lambda version=version: version)
    made.grouped_mlp_experimental = ModuleType("grouped_mlp_experimental")  # type: ignore[attr-defined]
    if missing := [name for name in kernels.KERNELS if not hasattr(made, name)]:
        raise ImportError(f"{SOURCES} defines no {', '.join(missing)}")
    sys.modules["transformer_engine_torch"] = made
    return made


def _text(pattern: str) -> str:
    """Return the sources without comments."""
    return "\n".join(_COMMENT.sub("", path.read_text()) for path in sorted(SOURCES.rglob(pattern)))


def _c_values(headers: str) -> dict[str, int]:
    """Return the values of the members of C enums."""
    found: dict[str, int] = {}
    for body in _C_ENUM.findall(headers):
        number = -1
        for entry in filter(None, (part.strip() for part in body.split(","))):
            name, _, value = (part.strip() for part in entry.partition("="))
            if value.lstrip("-").isdigit() or value in found:
                number = found[value] if value in found else int(value)
            else:
                number += 1
            found[name] = number
    return found


def _signature(definition: str, headers: str) -> inspect.Signature:
    """Return a function's parameters: types and names from its declaration, defaults and other names from the bindings.

    Arguments can be given by name only if the bindings name them.
    """
    target = re.match(r"\s*,\s*&?\s*transformer_engine::pytorch::(\w+)", definition)
    assert target is not None, definition
    (declared,) = re.findall(rf"\b{target[1]}\(([^;{{}}]*)\)\s*;", headers)
    named = _ARGUMENT.findall(definition)
    parameters = []
    for place, text in enumerate(re.split(r",(?![^<]*>)", declared)):
        kind, _, name = text.partition("=")[0].strip().rpartition(" ")
        kind = re.sub(r"\bconst\b|&|\s", "", kind)
        default: Any = inspect.Parameter.empty
        if named:
            name, value = named[place]
            if value:
                default = _DEFAULTS[value] if value in _DEFAULTS else float(value.rstrip("f"))
        passed = inspect.Parameter.POSITIONAL_OR_KEYWORD if named else inspect.Parameter.POSITIONAL_ONLY
        parameters.append(inspect.Parameter(name.lstrip("&*"), passed, default=default, annotation=kind))
    return inspect.Signature(parameters)


def _checked(name: str, signature: inspect.Signature, kernel: Callable[..., Any]) -> Callable[..., Any]:
    def call(*arguments: Any, **options: Any) -> Any:
        given = signature.bind(*arguments, **options)
        given.apply_defaults()
        for key, value in given.arguments.items():
            kind = signature.parameters[key].annotation
            if not _fits(value, kind):
                raise TypeError(f"{name}: {key} is {kind} in C++, and {type(value).__name__} is given")
        return kernel(**given.arguments)

    return call


def _absent(name: str) -> Callable[..., Any]:
    def call(*arguments: Any, **options: Any) -> Any:
        raise NotImplementedError(f"transformer_engine_torch.{name} has no version for a CPU")

    return call


def _fits(value: Any, kind: str) -> bool:
    """Return whether the bindings would convert ``value`` to a parameter of type ``kind``."""
    if inner := re.fullmatch(r"(?:std|at)::optional<(.*)>|(MaybeTensor)", kind):
        return value is None or _fits(value, inner[1] or "at::Tensor")
    if inner := re.fullmatch(r"std::vector<(.*)>", kind):
        return isinstance(value, list | tuple) and all(_fits(each, inner[1]) for each in value)
    return isinstance(value, _TYPES.get(kind, object))
