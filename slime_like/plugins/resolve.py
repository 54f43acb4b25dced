"""Lookup of what a setting names (a registered object, custom code in a module or a file, an entry point), and the line
of custom code that raised an error.

Imports neither torch nor the configuration, because workers that must start quickly use it.
"""

import ast
import inspect
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.metadata import entry_points
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from slime_like.errors import ConfigError, SlimeLikeError
from slime_like.system.processes import exempt_from_gc
from slime_like.system.words import from_here

BACKEND_GROUP = "slime_like.backends"
ENGINE_GROUP = "slime_like.engines"

_LONGEST = 300

CUSTOM = "`package.module:name` or `path/to/file.py:name`"
"""Form of the names of custom code, for messages."""


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


def import_path_problem(path: str) -> str | None:
    """Describe a malformed import path, or one whose module is not on this machine; ``None`` if the module is found.

    Modules are looked up along ``sys.path`` as an import does, but nothing is executed: that may take seconds. A name
    that the module lacks is therefore not found here.
    """
    module, _, name = path.rpartition(":")
    is_file = module.endswith(".py")
    if not name.isidentifier() or not (is_file or all(part.isidentifier() for part in module.split("."))):
        return f"is not an import path; give {CUSTOM}"
    spec, missing = find_module(module)
    if spec is not None:
        return None
    if is_file:
        return f"cannot be found: there is no file {module}{from_here(Path(module))}; correct the path"
    return (
        f"cannot be found: there is no module {missing}; install it, start in its directory, or give "
        "`path/to/file.py:name`"
    )


def may_have_parameter(path: str, parameter: str) -> bool:
    """Return False if the source of a custom function shows that it lacks this parameter. Nothing is executed."""
    module, _, name = path.rpartition(":")
    spec, _ = find_module(module)
    try:
        body = ast.parse(Path((spec and spec.origin) or "").read_bytes()).body
    except (OSError, SyntaxError, ValueError):  # no Python, or reported when it is imported
        return True
    found = [node.args for node in body if isinstance(node, ast.FunctionDef) and node.name == name]
    return not found or any(isinstance(node, ast.arg) and node.arg == parameter for node in ast.walk(found[-1]))


def resolve(kind: str, name: str, known: Mapping[str, Any]) -> Any:
    """Return the object registered as ``name``, or the one at ``package.module:name`` or ``path/to/file.py:name``.

    ``known`` has objects, or their import paths. ``kind`` is for messages ("loss", "advantage estimator"). Raises
    ``ValueError`` if the name is unknown, or cannot be imported.
    """
    found = known.get(name, name)
    if not isinstance(found, str):
        return found
    module_name, colon, attribute = found.rpartition(":")
    if not colon:
        raise ValueError(f"unknown {kind} {name!r}; use one of: {', '.join(sorted(known))}, or {CUSTOM}")
    try:
        module = _import_file(module_name) if module_name.endswith(".py") else import_module(module_name)
        return getattr(module, attribute)
    except (ImportError, AttributeError) as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        own = missing is None or module_name == missing or module_name.startswith(f"{missing}.")
        remedy = f"give {CUSTOM}" if own else f"install the package of {missing}, or correct {module_name}"
        raise ValueError(f"{kind} {name!r} cannot be imported ({error}); {remedy}") from error
    except Exception as error:  # the module runs when it is imported, and may raise anything
        raise ValueError(
            f"{kind} {name!r}: importing {module_name} fails with {type(error).__name__} ({error}); correct that module"
        ) from error


def _import_file(path: str) -> ModuleType:
    """Import a file as a module, once per process. It can import files next to it."""
    if path in sys.modules:
        return sys.modules[path]
    spec, _ = find_module(path)
    if spec is None or spec.loader is None:
        raise ImportError(f"there is no file {path}")
    if (directory := str(Path(path).parent)) not in sys.path:
        sys.path.append(directory)  # last, so no file of the user hides a library
    module = sys.modules[path] = module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[path]
        raise
    return module


def resolve_callable(kind: str, name: str, known: Mapping[str, Any]) -> Callable[..., Any]:
    """Return what ``resolve`` returns. Raise ``ValueError`` if it cannot be called."""
    found: Callable[..., Any] = resolve(kind, name, known)
    if not callable(found):
        raise ValueError(f"{kind} {name!r} is a {type(found).__name__}, which cannot be called; correct the name")
    return found


def require_options(
    subject: str, function: Callable[..., Any], options: Mapping[str, Any], given: Sequence[str] = ()
) -> None:
    """Raise ``ValueError`` unless a call with ``given`` by position and ``options`` by name is possible."""
    signature = inspect.signature(function)
    try:
        signature.bind(*given, **options)
    except TypeError as error:
        takes = ", ".join(map(str, signature.parameters.values())) or "nothing"
        raise ValueError(f"{subject} cannot be called with its options: {error}; it takes {takes}") from error


def unknown(field: str, name: str, known: Sequence[str], otherwise: str = "") -> Iterator[str]:
    """Yield that ``name`` is not among the ``known`` ones, if so."""
    if name not in known:
        use = f"{', '.join(known) or '(none is installed)'}{otherwise}"
        yield f"{field}={name} is unknown; use one of: {use}"


def installed_names(group: str) -> list[str]:
    """Return the sorted names registered in ``group``. Nothing is imported."""
    return sorted(installed_places(group))


def installed_places(group: str) -> Mapping[str, str]:
    """Return ``module:attribute`` by name registered in ``group``. Nothing is imported."""
    return _installed(group, tuple(sys.path))


@cache
def _installed(group: str, path: tuple[str, ...]) -> Mapping[str, str]:
    """Read a file of every package on ``path``. There are hundreds, so each group is read once."""
    return {point.name: point.value for point in entry_points(group=group)}


def load_installed(group: str, name: str, field: str) -> Any:
    """Import the object registered as ``name`` in ``group``.

    Raises ``ConfigError`` if the name is not registered. The message names the setting ``field`` and the known names.
    """
    known = {point.name: point for point in entry_points(group=group)}
    if name not in known:
        names = ", ".join(sorted(known)) or "(none)"
        raise ConfigError(f"{field}={name} is not installed; use one of: {names}", code="not-installed")
    with exempt_from_gc():
        return known[name].load()


def code_of(function: Any) -> CodeType | None:
    """Return the code that a call executes, without decorators that name what they wrap; ``None`` if not Python's."""
    function = inspect.unwrap(function)
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
