"""Documentation and options of parts, read from their sources, so reading them imports nothing."""

import ast
import re
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from slime_like.config.reading.fields import value_text

_ROOT = Path(__file__).parents[3]
"""Directory of this distribution's packages."""
_KINDS: Mapping[str, type | tuple[type, ...]] = {"integer": int, "number": (int, float), "switch": bool, "text": str}
_TYPES = {"int": "integer", "float": "number", "bool": "switch", "str": "text"}


@dataclass(frozen=True, slots=True)
class Option:
    """A keyword argument, its type and default as in YAML. ``default`` is ``None`` if it is required."""

    name: str
    type_text: str
    default: str | None
    meaning: str

    def accepts(self, value: Any) -> bool:
        """Return whether the value has the option's type. An option with default none may be none."""
        kind = _KINDS.get(self.type_text)
        if value is None or kind is None:
            return kind is None or self.default == "none"
        return isinstance(value, kind) and (kind is bool or not isinstance(value, bool))


@dataclass(frozen=True, slots=True)
class PartDocs:
    """One part.

    Attributes:
        summary: first line of its documentation.
        details: the other lines, without the sections about arguments and errors.
    """

    name: str
    summary: str
    details: str
    options: tuple[Option, ...]

    def option_problems(self, given: Mapping[str, Any]) -> Iterator[str]:
        """Yield a sentence, beginning with the option, for each value in ``given`` that the part does not take."""
        known = {option.name: option for option in self.options}
        takes = ", ".join(known) or "no options"
        for name, value in given.items():
            if name not in known:
                yield f"{name} is not an option of {self.name}; it takes {takes}"
            elif not known[name].accepts(value):
                yield f"{name}={value_text(value)} must be of type {known[name].type_text}; correct it"
        for option in self.options:
            if option.default is None and option.name not in given:
                yield f"{option.name} is missing, which {self.name} needs; set it"


def read_part(name: str, place: str) -> PartDocs:
    """Read the part at ``module:attribute``, or the module without an attribute."""
    module, _, attribute = place.partition(":")
    node = _found(module, attribute)
    summary, _, rest = _documentation(node).partition("\n")
    details = re.split(r"^(?:Args|Attributes|Returns|Raises):$", rest, maxsplit=1, flags=re.MULTILINE)[0]
    return PartDocs(name, summary, details.strip(), tuple(_options(module, node)))


@cache
def _tree(module: str) -> ast.Module:
    return ast.parse(_ROOT.joinpath(*module.split(".")).with_suffix(".py").read_text(encoding="utf-8"))


def _found(module: str, name: str) -> ast.AST:
    """Return the class or function of this name, followed through one import; the module if there is none."""
    tree = _tree(module)
    for statement in tree.body:
        if isinstance(statement, ast.FunctionDef | ast.ClassDef) and statement.name == name:
            return statement
        if isinstance(statement, ast.ImportFrom) and name in {alias.asname or alias.name for alias in statement.names}:
            return _found(statement.module or "", name)
    return tree


def _documentation(node: ast.AST) -> str:
    """Return the docstring as Markdown."""
    text = ast.get_docstring(node) if isinstance(node, ast.Module | ast.FunctionDef | ast.ClassDef) else None
    return (text or "").replace("``", "`")


def _options(module: str, node: ast.AST) -> Iterator[Option]:
    """Yield the keyword arguments of a function, the constructor's arguments with a default, or a dataclass's fields,
    inherited ones first."""
    section = re.search(r"^(?:Args|Attributes):\n((?:[ ]{4}.*\n?|\n)*)", _documentation(node), flags=re.MULTILINE)
    lines = textwrap.dedent(section[1]) if section else ""
    entries = re.findall(r"^(\w+): (.*(?:\n[ ]+.*)*)", lines, flags=re.MULTILINE)
    meanings = {name: " ".join(text.split()) for name, text in entries}
    for name, annotation, default in _arguments(module, node):
        written = ast.unparse(annotation).removesuffix(" | None") if annotation else ""
        shown = None if default is None else value_text(ast.literal_eval(default))
        yield Option(name, _TYPES.get(written, "mapping"), shown, meanings.get(name, ""))


_Argument = tuple[str, ast.expr | None, ast.expr | None]


def _arguments(module: str, node: ast.AST) -> list[_Argument]:
    """List (name, annotation, default)."""
    if isinstance(node, ast.FunctionDef):
        named = zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)
        return [(one.arg, one.annotation, default) for one, default in named]
    if not isinstance(node, ast.ClassDef):
        return []
    made = next((one for one in node.body if isinstance(one, ast.FunctionDef) and one.name == "__init__"), None)
    if made is not None:
        with_default = made.args.args[len(made.args.args) - len(made.args.defaults) :]
        named = zip(with_default, made.args.defaults, strict=True)
        return [(one.arg, one.annotation, default) for one, default in named]
    found: dict[str, _Argument] = {}
    for base in node.bases:
        inherited = _found(module, ast.unparse(base))
        found |= {one[0]: one for one in _arguments(module, inherited)}
    for field in node.body:
        if isinstance(field, ast.AnnAssign) and not ast.unparse(field.annotation).startswith("ClassVar"):
            name = ast.unparse(field.target)
            found[name] = (name, field.annotation, field.value)
    return list(found.values())
