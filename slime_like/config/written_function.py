"""What a module's source says of a function, found out without importing it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from inspect import Parameter, Signature
from pathlib import Path
from typing import Any

from slime_like.config.import_path import find_module


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


def written_function(path: str) -> WrittenFunction | None:
    """The function at ``package.module:name``; ``None`` where its source does not tell for certain."""
    module, _, name = path.partition(":")
    spec, _ = find_module(module)
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        return None
    try:
        tree = ast.parse(Path(spec.origin).read_bytes(), spec.origin)
    except (OSError, SyntaxError, ValueError):
        return None
    found = [node for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    found = [node for node in found if node.name == name]
    if len(found) != 1 or sum(bound == name for node in ast.walk(tree) for bound in _bound(node)) != 1:
        return None
    [function] = found
    return WrittenFunction(
        f"{spec.origin}:{function.lineno}",
        Signature(list(_parameters(function.args))),
        tuple(_last_name(decorator) for decorator in function.decorator_list),
        function.returns,
        isinstance(function, ast.AsyncFunctionDef),
    )


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
