"""Check of an import path without importing it, which may take seconds and torch."""

from pathlib import Path

from slime_like.plugins.traceback import find_module, is_file
from slime_like.system.words import from_here

CUSTOM = "`package.module:name` or `path/to/file.py:name`"
"""How custom code is named, for messages."""


def import_path_problem(path: str) -> str | None:
    """Describe a path that is none, or a module that is not on this machine, with the remedy; ``None`` if there is one.

    Modules are looked up as an import would, along ``sys.path``, but parents are not executed. What is in the module is
    found when it is imported.
    """
    module, _, name = path.rpartition(":")
    if not name.isidentifier() or not (is_file(module) or all(part.isidentifier() for part in module.split("."))):
        return f"is not an import path; give {CUSTOM}"
    spec, missing = find_module(module)
    if spec is not None:
        return None
    if is_file(module):
        return f"cannot be found: there is no file {module}{from_here(Path(module))}; correct the path"
    return (
        f"cannot be found: there is no module {missing}; install it, start in its directory, or give "
        "`path/to/file.py:name`"
    )
