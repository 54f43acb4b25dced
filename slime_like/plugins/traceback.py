"""Location of custom code (``package.module:name``, ``path/to/file.py:name``), and its line that an error comes from.

Imports neither torch nor the configuration: workers that must start quickly use it.
"""

import sys
import traceback
from collections.abc import Collection, Iterator
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from inspect import unwrap
from pathlib import Path
from types import CodeType
from typing import Any

_OURS = frozenset({"slime_like", "backends", "rollout", "builtins"})
_LONGEST = 300


def is_file(module: str) -> bool:
    """Whether ``module:name`` gives a file in place of a module."""
    return module.endswith(".py")


def find_module(module: str) -> tuple[ModuleSpec | None, str]:
    """The spec of a module, or of a file ``x.py``; or none and the name of the first part that is missing.

    Nothing is imported.
    """
    if is_file(module):
        return spec_from_file_location(module, module) if Path(module).is_file() else None, module
    places: list[str] | None = None
    spec: ModuleSpec | None = None
    parts = module.split(".")
    for depth in range(1, len(parts) + 1):
        name = ".".join(parts[:depth])
        # Packages that are installed editable have a finder of theirs besides Python's.
        spec = next(filter(None, (finder.find_spec(name, places, None) for finder in sys.meta_path)), None)
        if spec is None:
            return None, name
        places = list(spec.submodule_search_locations or [])
    return spec, module


def code_of(function: Any) -> CodeType | None:
    """Code that a call executes, behind decorators that name what they wrap; none where it is not Python's."""
    function = unwrap(function)
    code = getattr(function, "__code__", None) or getattr(type(function).__call__, "__code__", None)
    return code if isinstance(code, CodeType) else None


def raised_at(error: BaseException, files: Collection[str]) -> str | None:
    """File and line of the innermost frame in one of these files, of the error or else of what caused it."""
    for link in causes(error):
        frames = [frame for frame in traceback.extract_tb(link.__traceback__) if frame.filename in files]
        if frames:
            return f"{frames[-1].filename}:{frames[-1].lineno}"
    return None


def causes(error: BaseException, contexts: bool = False) -> Iterator[BaseException]:
    """The error and what caused it, each once; with ``contexts`` also what was being handled when it was raised."""
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        yield link
        seen.add(id(link))
        link = link.__cause__ or (link.__context__ if contexts else None)


def place(error: BaseException, code: CodeType) -> str:
    """File and line: where the code's file raised, or, where its result is rejected, of its definition."""
    return raised_at(error, [code.co_filename]) or _definition(code)


def named_place(error: BaseException, path: str, member: str) -> str:
    """Find the ``place`` of ``package.module:name``, which may have failed to import.

    The definition meant is that of the object's attribute ``member``, where it has one: that was called.
    """
    module, _, name = path.rpartition(":")
    found = getattr(sys.modules.get(module), name, None)
    code = None if found is None else code_of(getattr(found, member, found))
    spec, _ = find_module(module)
    origin = None if spec is None else spec.origin
    files = {origin, None if code is None else code.co_filename, *_files_of_classes(found)} - {None}
    raised = raised_at(error, [file for file in files if file is not None])
    return raised or (_definition(code) if code is not None else origin or module)


def format_error(field: str, path: str, error: BaseException, member: str = "__call__") -> str:
    """Describe a failure of a custom object: its field and name, the error and its place."""
    what = f"{type(error).__name__}: {error}".strip()
    first = what.splitlines()[0][:_LONGEST]
    return f"{field}={path} failed with {first} ({named_place(error, path, member)})"


def full_traceback(error: BaseException) -> str:
    """Format the whole traceback, with causes."""
    return "".join(traceback.format_exception(error))


def _definition(code: CodeType) -> str:
    return f"{code.co_filename}:{code.co_firstlineno}"


def _files_of_classes(found: Any) -> list[str]:
    """List the files of a class and of those it inherits from, but for this package's."""
    if not isinstance(found, type):
        return []
    modules = [sys.modules.get(base.__module__) for base in found.__mro__ if base.__module__.split(".")[0] not in _OURS]
    return [file for module in modules if (file := getattr(module, "__file__", None))]
