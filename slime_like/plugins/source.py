"""What a module's source says of a function, found out without importing it."""

from __future__ import annotations

import ast
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from inspect import Parameter, Signature
from pathlib import Path
from typing import Any

from slime_like.plugins.import_path import import_path_problem
from slime_like.plugins.traceback import find_module

_LITERALS = (ast.Constant, ast.JoinedStr, ast.List, ast.Tuple, ast.Dict, ast.Set)
"""What no call can be made of, whatever stands in it."""

_LONGEST = 40


@dataclass(frozen=True, slots=True)
class WrittenFunction:
    """A ``def`` at the top of a module, which nothing else there rebinds.

    Attributes:
        place: file and line.
        signature: annotations and default values are their text.
        decorators: their names, without what stands before the last dot.
        returns: the annotation of what it returns, if it has one.
        is_async: it is written ``async def``.
    """

    place: str
    signature: Signature
    decorators: tuple[str, ...]
    returns: ast.expr | None
    is_async: bool


def own_problem(path: str) -> str | None:
    """What is certainly wrong with ``package.module:name`` for whoever wants to call what is there.

    Half a sentence with its remedy, as of ``import_path_problem``.
    """
    if problem := import_path_problem(path):
        return problem
    origin, node = _written(path)
    value = node.value if isinstance(node, ast.Assign | ast.AnnAssign) else None
    if not isinstance(value, _LITERALS):
        return None
    return f"is {ast.unparse(value)[:_LONGEST]} ({origin}:{value.lineno}), which cannot be called; correct the name"


def written_function(path: str) -> WrittenFunction | None:
    """The function at ``package.module:name``; ``None`` where its source does not tell for certain."""
    origin, function = _written(path)
    if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
        return None
    return WrittenFunction(
        f"{origin}:{function.lineno}",
        Signature(list(_parameters(function.args))),
        tuple(_last_name(decorator) for decorator in function.decorator_list),
        function.returns,
        isinstance(function, ast.AsyncFunctionDef),
    )


def _written(path: str) -> tuple[str, ast.stmt | None]:
    """The module's file, and the one statement at its top that binds the name; none where others may bind it too."""
    module, _, name = path.partition(":")
    spec, _ = find_module(module)
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        return "", None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # told when it is imported
            tree = ast.parse(Path(spec.origin).read_bytes(), spec.origin)
    except (OSError, SyntaxError, ValueError):
        return "", None
    found = [node for node in tree.body if name in _bound_by(node)]
    if len(found) != 1 or sum(bound == name for node in ast.walk(tree) for bound in _bound(node)) != 1:
        return "", None
    return spec.origin, found[0]


def _bound_by(statement: ast.stmt) -> list[str]:
    """Names that a function's definition or the assignment to a name binds."""
    if isinstance(statement, ast.Assign):
        return [target.id for target in statement.targets if isinstance(target, ast.Name)]
    if isinstance(statement, ast.AnnAssign):
        return [statement.target.id] if isinstance(statement.target, ast.Name) else []
    return [statement.name] if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef) else []


def _bound(node: ast.AST) -> Iterator[str]:
    """Names that a node binds, in whatever scope: a name that is also another's is not looked at further."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield node.name
    elif isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
        yield node.id
    elif isinstance(node, ast.alias):
        yield node.asname or node.name


def _parameters(arguments: ast.arguments) -> Iterator[Parameter]:
    positional = [*arguments.posonlyargs, *arguments.args]
    defaults = [None] * (len(positional) - len(arguments.defaults)) + list(arguments.defaults)
    for index, (own, default) in enumerate(zip(positional, defaults, strict=True)):
        only = index < len(arguments.posonlyargs)
        yield _parameter(own, Parameter.POSITIONAL_ONLY if only else Parameter.POSITIONAL_OR_KEYWORD, default)
    if arguments.vararg is not None:
        yield _parameter(arguments.vararg, Parameter.VAR_POSITIONAL)
    for own, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        yield _parameter(own, Parameter.KEYWORD_ONLY, default)
    if arguments.kwarg is not None:
        yield _parameter(arguments.kwarg, Parameter.VAR_KEYWORD)


def _parameter(argument: ast.arg, kind: Any, default: ast.expr | None = None) -> Parameter:
    return Parameter(
        argument.arg,
        kind,
        default=Parameter.empty if default is None else _Text(ast.unparse(default)),
        annotation=Parameter.empty if argument.annotation is None else _Text(ast.unparse(argument.annotation)),
    )


class _Text(str):
    """Source that a signature shows as it is written."""

    def __repr__(self) -> str:
        return str(self)


def _last_name(decorator: ast.expr) -> str:
    return ast.unparse(decorator).rpartition(".")[2]
