"""Does ``package.module:name`` lead anywhere? Found out without importing it: that may cost seconds, and torch."""

from __future__ import annotations

import symtable
import warnings
from importlib.machinery import ModuleSpec
from importlib.util import decode_source
from pathlib import Path

from slime_like.plugins.traceback import find_module


def import_path_problem(path: str) -> str | None:
    """What is wrong with an import path, as half a sentence with its remedy; ``None`` where nothing is.

    Modules are looked up as an import would, along ``sys.path``, but parents are not executed. Names are looked up in
    the module's source, where it has one; what ``import *`` or ``__getattr__`` bring is believed.
    """
    module, _, name = path.partition(":")
    if not name.isidentifier() or not all(part.isidentifier() for part in module.split(".")):
        return "is no import path; give `package.module:name`"
    spec, missing = find_module(module)
    if spec is None:
        return f"leads nowhere: there is no module {missing}; install it, or start with its directory in PYTHONPATH"
    if broken := _syntax_problem(spec):
        return broken
    if _may_define(spec, name):
        return None
    return f"leads nowhere: {spec.origin} defines no {name}; correct the name"


def _syntax_problem(spec: ModuleSpec) -> str | None:
    if spec.origin is None or not spec.origin.endswith(".py"):
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # told when it is imported
            compile(Path(spec.origin).read_bytes(), spec.origin, "exec", dont_inherit=True)
    except SyntaxError as error:
        return f"cannot be imported: {spec.origin}:{error.lineno}: {type(error).__name__}: {error.msg}; correct it"
    except ValueError as error:  # null bytes, in some versions
        return f"cannot be imported: {spec.origin}: {error}; correct it"
    return None


def _may_define(spec: ModuleSpec, name: str) -> bool:
    if spec.origin is None or not spec.origin.endswith(".py"):
        return True
    source = decode_source(Path(spec.origin).read_bytes())
    table = symtable.symtable(source, spec.origin, "exec")
    bound = {symbol.get_name() for symbol in table.get_symbols() if symbol.is_assigned() or symbol.is_imported()}
    bound |= {child.get_name() for child in table.get_children()}
    return name in bound or "__getattr__" in bound or "import *" in source
