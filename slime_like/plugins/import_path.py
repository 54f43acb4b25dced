"""Check of an import path without importing it, which may take seconds and torch."""

import ast
import symtable
import warnings
from importlib.util import decode_source
from pathlib import Path

from slime_like.plugins.traceback import find_module, is_file
from slime_like.system.words import from_here

_LITERALS = (ast.Constant, ast.JoinedStr, ast.List, ast.Tuple, ast.Dict, ast.Set)
"""What no call can be made of."""

_SHOWN_CHARS = 40

CUSTOM = "`package.module:name` or `path/to/file.py:name`"
"""How custom code is named, for messages."""


def import_path_problem(path: str) -> str | None:
    """Describe the problem of a callable's import path, with its remedy; ``None`` if there is none."""
    return absence_problem(path) or source_problem(path)


def absence_problem(path: str) -> str | None:
    """Describe a module that is not on this machine; ``None`` if it is, or the path is none.

    Modules are looked up as an import would, along ``sys.path``, but parents are not executed.
    """
    module = path.rpartition(":")[0]
    if not _is_import_path(path):
        return None
    spec, missing = find_module(module)
    if spec is not None:
        return None
    if is_file(module):
        return f"cannot be found: there is no file {module}{from_here(Path(module))}; correct the path"
    return (
        f"cannot be found: there is no module {missing}; install it, start in its directory, or give "
        "`path/to/file.py:name`"
    )


def source_problem(path: str) -> str | None:
    """Describe a path that is none, or a module whose source has no such callable; ``None`` if there is no such fault.

    Names are looked up in the module's source, where it has one; what ``import *`` or ``__getattr__`` bring is
    accepted.
    """
    module, _, name = path.rpartition(":")
    if not _is_import_path(path):
        return f"is not an import path; give {CUSTOM}"
    spec, _ = find_module(module)
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        return None
    content = Path(spec.origin).read_bytes()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # shown when it is imported
            compile(content, spec.origin, "exec", dont_inherit=True)
    except SyntaxError as error:
        return f"cannot be imported: {spec.origin}:{error.lineno}: {type(error).__name__}: {error.msg}; correct it"
    except ValueError as error:  # null bytes, in some versions
        return f"cannot be imported: {spec.origin}: {error}; correct it"
    return _name_problem(decode_source(content), spec.origin, name)


def _is_import_path(path: str) -> bool:
    module, _, name = path.rpartition(":")
    return name.isidentifier() and (is_file(module) or all(part.isidentifier() for part in module.split(".")))


def _name_problem(source: str, file: str, name: str) -> str | None:
    table = symtable.symtable(source, file, "exec")
    bound = {symbol.get_name() for symbol in table.get_symbols() if symbol.is_assigned() or symbol.is_imported()}
    bound |= {child.get_name() for child in table.get_children()}
    if not ({name, "__getattr__"} & bound or "import *" in source):
        return f"cannot be found: {file} defines no {name}; correct the name"
    value = _only_value(ast.parse(source), name)
    if not isinstance(value, _LITERALS):
        return None
    return f"is {ast.unparse(value)[:_SHOWN_CHARS]} ({file}:{value.lineno}), which cannot be called; correct the name"


def _only_value(tree: ast.Module, name: str) -> ast.expr | None:
    """Return the value of a module-level assignment to the name, if nothing else binds it."""
    names = [getattr(node, "asname", None) or getattr(node, "name", None) for node in ast.walk(tree)]
    stores = [node for node in ast.walk(tree) if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)]
    if names.count(name) + sum(node.id == name for node in stores) != 1:
        return None
    for statement in tree.body:
        targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
        if isinstance(statement, ast.Assign | ast.AnnAssign) and any(
            isinstance(target, ast.Name) and target.id == name for target in targets
        ):
            return statement.value
    return None
