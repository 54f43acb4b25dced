"""Location of custom code (``package.module:name``, ``path/to/file.py:name``), and the line in it that raised an error.

Imports neither torch nor the configuration, because workers that must start quickly use it.
"""

import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from inspect import unwrap
from pathlib import Path
from types import CodeType
from typing import Any

from slime_like.errors import SlimeLikeError

_LONGEST = 300


def find_module(module: str) -> tuple[ModuleSpec | None, str]:
    """Return the spec of a module or of a file ``x.py``, or ``None`` and the name of the first part that is missing.

    Nothing is imported.
    """
    if module.endswith(".py"):
        return spec_from_file_location(module, module) if Path(module).is_file() else None, module
    places: list[str] | None = None
    spec: ModuleSpec | None = None
    parts = module.split(".")
    for depth in range(1, len(parts) + 1):
        name = ".".join(parts[:depth])
        # Packages installed in editable mode add finders of their own.
        spec = next(filter(None, (finder.find_spec(name, places, None) for finder in sys.meta_path)), None)
        if spec is None:
            return None, name
        places = list(spec.submodule_search_locations or [])
    return spec, module


def code_of(function: Any) -> CodeType | None:
    """Return the code that a call executes, without decorators that name what they wrap; ``None`` if not Python's."""
    function = unwrap(function)
    code = getattr(function, "__code__", None) or getattr(type(function).__call__, "__code__", None)
    return code if isinstance(code, CodeType) else None


def causes(error: BaseException) -> Iterator[BaseException]:
    """Yield the error, its cause or the error being handled when it was raised, and so on, each once."""
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        yield link
        seen.add(id(link))
        link = link.__cause__ or link.__context__


def place(error: BaseException, file: str, otherwise: str) -> str:
    """Return the innermost line of ``file`` in the traceback of the error or of its causes, or ``otherwise``."""
    for link in causes(error):
        if lines := [frame.lineno for frame in traceback.extract_tb(link.__traceback__) if frame.filename == file]:
            return f"{file}:{lines[-1]}"
    return otherwise


def place_in_code(error: BaseException, code: CodeType) -> str:
    """Return the line of the code's file that raised the error, or the definition if its result was rejected."""
    return place(error, code.co_filename, f"{code.co_filename}:{code.co_firstlineno}")


def named_place(error: BaseException, path: str, member: str) -> str:
    """Return the ``place`` in ``package.module:name``, which may have failed to import.

    ``member`` is the attribute of the object that was called, if the object has it.
    """
    module, _, name = path.rpartition(":")
    spec, _ = find_module(module)
    file = (spec.origin if spec else None) or module
    found = getattr(sys.modules.get(module), name, None)
    code = code_of(getattr(found, member, found))
    return place(error, file, place_in_code(error, code) if code else file)


def format_error(field: str, path: str, error: BaseException, member: str = "__call__") -> str:
    """Describe a failure of a custom object: field, name, error and place."""
    what = f"{type(error).__name__}: {error}".strip()
    first = what.splitlines()[0][:_LONGEST]
    return f"{field}={path} failed with {first} ({named_place(error, path, member)})"


@contextmanager
def naming(error: type[SlimeLikeError], code: str, field: str, path: str, member: str, who: str = "") -> Iterator[None]:
    """Turn an exception of a custom object into an ``error``. Our own errors are complete, so they pass unchanged."""
    try:
        yield
    except SlimeLikeError:
        raise
    except Exception as cause:
        problem, trace = format_error(field, path, cause, member), "".join(traceback.format_exception(cause))
        raise error(problem, code=code, who=who, remedy="correct it", users_traceback=trace) from cause
