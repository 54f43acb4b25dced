"""The object that a setting names: registered, or custom code in a module or a file."""

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.util import module_from_spec
from pathlib import Path
from types import ModuleType
from typing import Any

from slime_like.plugins.import_path import CUSTOM
from slime_like.plugins.traceback import find_module, is_file


def resolve(kind: str, name: str, known: Mapping[str, Any]) -> Any:
    """The object registered under ``name``, or whatever is at ``package.module:name`` or ``path/to/file.py:name``.

    Args:
        kind: what is looked for, for the message ("loss", "advantage estimator").
        known: the registry: objects, or their import paths.

    Raises:
        ValueError: unknown name (the known ones are listed), or an import path that leads nowhere.
    """
    found = known.get(name, name)
    if not isinstance(found, str):
        return found
    module_name, colon, attribute = found.rpartition(":")
    if not colon:
        raise ValueError(f"unknown {kind} {name!r}; known: {', '.join(sorted(known))}, or give {CUSTOM}")
    try:
        module = _import_file(module_name) if is_file(module_name) else import_module(module_name)
        return getattr(module, attribute)
    except (ImportError, AttributeError) as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        own = missing is None or module_name == missing or module_name.startswith(f"{missing}.")
        remedy = f"give {CUSTOM}" if own else f"install what has {missing}, or correct {module_name}"
        raise ValueError(f"{kind} {name!r} cannot be imported ({error}); {remedy}") from error
    except Exception as error:  # importing runs the module, which raises what it likes
        raise ValueError(
            f"{kind} {name!r}: importing {module_name} fails with {type(error).__name__} ({error}); correct that module"
        ) from error


def _import_file(path: str) -> ModuleType:
    """The file as a module, once in a process; files beside it can be imported from it."""
    if path in sys.modules:
        return sys.modules[path]
    spec, _ = find_module(path)
    if spec is None or spec.loader is None:
        raise ImportError(f"there is no file {path}")
    if (directory := str(Path(path).parent)) not in sys.path:
        sys.path.append(directory)  # behind all others: nothing of the user's hides a library
    module = sys.modules[path] = module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[path]
        raise
    return module


def resolve_callable(kind: str, name: str, known: Mapping[str, Any]) -> Callable[..., Any]:
    """``resolve``, and ``ValueError`` where what is there cannot be called."""
    found: Callable[..., Any] = resolve(kind, name, known)
    if not callable(found):
        raise ValueError(f"{kind} {name!r} is a {type(found).__name__}, which cannot be called; correct the name")
    return found
