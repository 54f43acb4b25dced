"""The object that a setting names: registered, or at ``package.module:name``."""

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def resolve(kind: str, name: str, known: Mapping[str, Any]) -> Any:
    """The object registered under ``name``, or whatever is at ``package.module:name``.

    Args:
        kind: what is looked for, for the message ("loss", "advantage estimator").
        known: the registry: objects, or their import paths.

    Raises:
        ValueError: unknown name (the known ones are listed), or an import path that leads nowhere.
    """
    found = known.get(name, name)
    if not isinstance(found, str):
        return found
    module_name, colon, attribute = found.partition(":")
    if not colon:
        raise ValueError(f"unknown {kind} {name!r}; known: {', '.join(sorted(known))}, or give `package.module:name`")
    try:
        return getattr(import_module(module_name), attribute)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{kind} {name!r} cannot be imported ({error}); give `package.module:name`") from error
    except Exception as error:  # importing runs the module, which raises what it likes
        raise ValueError(
            f"{kind} {name!r}: importing {module_name} fails with {type(error).__name__} ({error}); correct that module"
        ) from error


def resolve_callable(kind: str, name: str, known: Mapping[str, Any]) -> Callable[..., Any]:
    """``resolve``, and ``ValueError`` where what is there cannot be called."""
    found: Callable[..., Any] = resolve(kind, name, known)
    if not callable(found):
        raise ValueError(f"{kind} {name!r} is a {type(found).__name__}, which cannot be called; correct the name")
    return found
