"""Built-in parts that settings choose by name, with their documentation and options.

The documentation is read from the sources, so listing the names imports none of the parts.
"""

import ast
import re
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path

from slime_like.config import algorithm
from slime_like.config.reading.fields import value_text
from slime_like.config.rollout import AGENT, ENVIRONMENT
from slime_like.plugins.entry_points import BACKEND_GROUP, ENGINE_GROUP
from slime_like.sandbox.environments.registry import REGISTERED as ENVIRONMENTS
from slime_like.sandbox.rewards.registry import REGISTERED as REWARDS
from slime_like.weights.transports import names

LOSSES = {name: f"slime_like.algorithms.losses.policy:{part}" for name, part in algorithm.LOSSES.items()}
ADVANTAGES = {
    name: part if ":" in part else f"slime_like.algorithms.advantages:{part}"
    for name, part in algorithm.ADVANTAGES.items()
}
TRANSPORTS = {name: f"slime_like.weights.transports.{module}" for name, (module, _) in names.TRANSPORTS.items()}
_OWN_PACKAGES = ("backends.", "rollout.")
_ROOT = Path(__file__).parents[2]
"""Directory of this distribution's packages."""


@dataclass(frozen=True, slots=True)
class Option:
    """A keyword argument, its type and default as in YAML. ``default`` is ``None`` if it is required."""

    name: str
    type_text: str
    default: str | None
    meaning: str


@dataclass(frozen=True, slots=True)
class Part:
    """One part.

    Attributes:
        summary: first line of its documentation.
        details: the other lines, without the sections about arguments and errors.
    """

    name: str
    summary: str
    details: str
    options: tuple[Option, ...]


def named_parts() -> dict[str, tuple[Part, ...]]:
    """Return the built-in parts by the setting that accepts their names."""
    places: dict[str, Mapping[str, str]] = {
        "reward.functions": REWARDS,
        "algorithm.loss": LOSSES,
        "algorithm.advantage": ADVANTAGES,
        "rollout.environment.name": ENVIRONMENTS,
        "rollout.engine": _modules(ENGINE_GROUP),
        "trainer.backend": _modules(BACKEND_GROUP),
        "sync.transport": TRANSPORTS,
    }
    found = {setting: tuple(_part(name, place) for name, place in named.items()) for setting, named in places.items()}
    found["reward.functions"] += (
        Part(ENVIRONMENT, "The rewards that `rollout.environment` returned, summed over a conversation.", "", ()),
        Part(AGENT, "The reward that `rollout.agent` returned.", "", ()),
    )
    return found


def _modules(group: str) -> dict[str, str]:
    """Return the modules of this distribution's entry points, which describe engines and trainers."""
    points = [point for point in entry_points(group=group) if point.value.startswith(_OWN_PACKAGES)]
    return {point.name: point.module for point in points}


def _part(name: str, place: str) -> Part:
    module, _, attribute = place.partition(":")
    tree = _tree(module)
    node: ast.AST = tree
    for statement in tree.body:
        if isinstance(statement, ast.FunctionDef | ast.ClassDef) and statement.name == attribute:
            node = statement
    text = ast.get_docstring(node) if isinstance(node, ast.Module | ast.FunctionDef | ast.ClassDef) else None
    summary, _, rest = (text or "").replace("``", "`").partition("\n")
    details = re.split(r"^(?:Args|Returns|Raises):$", rest, maxsplit=1, flags=re.MULTILINE)[0]
    return Part(name, summary, details.strip(), tuple(_options(node, rest)))


@cache
def _tree(module: str) -> ast.Module:
    return ast.parse(_ROOT.joinpath(*module.split(".")).with_suffix(".py").read_text(encoding="utf-8"))


_TYPES = {"int": "integer", "float": "number", "bool": "switch", "str": "text"}


def _options(node: ast.AST, documentation: str) -> Iterator[Option]:
    """Yield the keyword arguments of a function, or the constructor's arguments with a default of a class."""
    named: list[tuple[ast.arg, ast.expr | None]] = []
    if isinstance(node, ast.FunctionDef):
        named = list(zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True))
    for made in node.body if isinstance(node, ast.ClassDef) else ():
        if isinstance(made, ast.FunctionDef) and made.name == "__init__":
            defaults = made.args.defaults
            named = list(zip(made.args.args[len(made.args.args) - len(defaults) :], defaults, strict=True))
    meanings = _meanings(documentation)
    for argument, default in named:
        written = ast.unparse(argument.annotation).removesuffix(" | None") if argument.annotation else ""
        shown = None if default is None else value_text(ast.literal_eval(default))
        yield Option(argument.arg, _TYPES.get(written, "mapping"), shown, meanings.get(argument.arg, ""))


def _meanings(documentation: str) -> dict[str, str]:
    """Return the text of each argument in the section ``Args`` of a docstring."""
    section = re.search(r"^Args:\n((?:[ ]{4}.*\n?|\n)*)", documentation, flags=re.MULTILINE)
    lines = textwrap.dedent(section[1]) if section else ""
    entries = re.findall(r"^(\w+): (.*(?:\n[ ]+.*)*)", lines, flags=re.MULTILINE)
    return {name: " ".join(text.split()) for name, text in entries}
