"""Environments by name or by import path."""

from collections.abc import Mapping
from typing import Any

from slime_like.interfaces.environment import Environment
from slime_like.plugins.resolve import require_options, resolve_callable

REGISTERED: Mapping[str, str] = {"calculator": "slime_like.examples.calculator:Calculator"}
"""Included environments, as import paths. Workers import them; this package never does."""


def build_environment(name: str, options: Mapping[str, Any]) -> Environment:
    """Create an environment of the class registered as ``name``, or of the class at ``package.module:name``.

    Raises ``ValueError`` if there is no such class, or it does not take the options.
    """
    found = resolve_callable("environment", name, REGISTERED)
    require_options(f"environment {name!r}", found, options)
    try:
        return found(**options)
    except Exception as error:
        raise ValueError(f"environment {name!r} rejects its options: {type(error).__name__}: {error}") from error
