"""Does ``package.module:name`` lead anywhere? Found out without importing it: that may cost seconds, and torch."""

from __future__ import annotations

import symtable
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path


def import_path_problem(path: str) -> str | None:
    """What is wrong with an import path, as half a sentence with its remedy; ``None`` where nothing is.

    Modules are looked up as an import would, along ``sys.path``, but parents are not executed. Names are looked up in
    the module's source, where it has one that can be read; what ``import *`` or ``__getattr__`` bring is believed.
    """
    module, _, name = path.partition(":")
    if not name.isidentifier() or not all(part.isidentifier() for part in module.split(".")):
        return "is no import path; give `package.module:name`"
    spec, missing = find_module(module)
    if spec is None:
        return f"leads nowhere: there is no module {missing}; install it, or start with its directory in PYTHONPATH"
    if _may_define(spec, name):
        return None
    return f"leads nowhere: {spec.origin} defines no {name}; correct the name"


def find_module(module: str) -> tuple[ModuleSpec | None, str]:
    """The module's spec, or none and the name of the first part that is missing."""
    places: list[str] | None = None
    spec: ModuleSpec | None = None
    parts = module.split(".")
    for depth in range(1, len(parts) + 1):
        name = ".".join(parts[:depth])
        spec = PathFinder.find_spec(name, places)
        if spec is None:
            return None, name
        places = list(spec.submodule_search_locations or [])
    return spec, module


def _may_define(spec: ModuleSpec, name: str) -> bool:
    if spec.origin is None or not spec.origin.endswith(".py"):
        return True
    source = Path(spec.origin).read_text(encoding="utf-8")
    try:
        table = symtable.symtable(source, spec.origin, "exec")
    except SyntaxError:
        return True  # importing it says where the error is, far better than we could
    bound = {symbol.get_name() for symbol in table.get_symbols() if symbol.is_assigned() or symbol.is_imported()}
    bound |= {child.get_name() for child in table.get_children()}
    return name in bound or "__getattr__" in bound or "import *" in source
