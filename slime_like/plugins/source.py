"""The source file of custom code, found without importing it."""

from pathlib import Path

from slime_like.plugins.traceback import find_module


def source_file(path: str) -> Path | None:
    """The file of ``package.module:name`` or ``path/to/file.py:name``; ``None`` where there is none, or it is no
    Python source."""
    module, colon, _ = path.rpartition(":")
    spec, _ = find_module(module) if colon else (None, "")
    origin = None if spec is None else spec.origin
    return Path(origin) if origin is not None and origin.endswith(".py") else None
