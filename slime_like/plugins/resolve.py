"""Lookup of what a setting names: a registered object, custom code in a module or a file, or an entry point."""

import ast
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from importlib.util import module_from_spec
from pathlib import Path
from types import ModuleType
from typing import Any

from slime_like.errors import ConfigError
from slime_like.plugins.traceback import find_module
from slime_like.system.processes import permanent_allocations
from slime_like.system.words import from_here

BACKEND_GROUP = "slime_like.backends"
ENGINE_GROUP = "slime_like.engines"

CUSTOM = "`package.module:name` or `path/to/file.py:name`"
"""Form of the names of custom code, for messages."""


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
    with permanent_allocations():
        return known[name].load()
