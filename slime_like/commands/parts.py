"""What settings choose by name: each built-in part with the first line of its documentation and its options.

Documentation is read from the sources, so that listing the names imports none of the parts.
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
ADVANTAGES = {name: f"slime_like.algorithms.advantages:{part}" for name, part in algorithm.ADVANTAGES.items()}
TRANSPORTS = {name: f"slime_like.weights.transports.{module}" for name, (module, _) in names.TRANSPORTS.items()}
_OWN_PACKAGES = ("backends.", "rollout.")
_ROOT = Path(__file__).parents[2]
"""Where the packages of this distribution lie, side by side."""


@dataclass(frozen=True, slots=True)
class Option:
    """A keyword argument; ``default`` is none where it must be given. Type and default as in YAML."""

    name: str
    type_text: str
    default: str | None
    meaning: str


@dataclass(frozen=True, slots=True)
class Part:
    """One name.

    Attributes:
        summary: first line of its documentation.
        details: the rest, without the sections about arguments and errors.
    """

    name: str
    summary: str
    details: str
    options: tuple[Option, ...]

    @property
    def defaults(self) -> dict[str, str | None]:
        return {option.name: option.default for option in self.options}


def named_parts() -> dict[str, tuple[Part, ...]]:
    """Built-in parts by the setting that takes their name."""
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
    summed = "The rewards that `rollout.environment` returned, summed over a conversation."
    found["reward.functions"] += (
        Part(ENVIRONMENT, summed, "", ()),
        Part(AGENT, "The reward that `rollout.agent` returned.", "", ()),
    )
    return found


def _modules(group: str) -> dict[str, str]:
    """Modules of the distribution's entry points: they describe engines and trainers for users."""
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
    """Keyword arguments of a function; of a class, what its constructor has defaults for."""
    if isinstance(node, ast.ClassDef):
        made = [method for method in node.body if isinstance(method, ast.FunctionDef) and method.name == "__init__"]
        arguments = made[0].args if made else ast.arguments([], [], None, [], [], None, [])
        named: list[tuple[ast.arg, ast.expr | None]] = list(
            zip(arguments.args[len(arguments.args) - len(arguments.defaults) :], arguments.defaults, strict=True)
        )
    elif isinstance(node, ast.FunctionDef):
        named = list(zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True))
    else:
        named = []
    meanings = _meanings(documentation)
    for argument, default in named:
        written = ast.unparse(argument.annotation).removesuffix(" | None") if argument.annotation else ""
        shown = None if default is None else value_text(ast.literal_eval(default))
        yield Option(argument.arg, _TYPES.get(written, "mapping"), shown, meanings.get(argument.arg, ""))


def _meanings(documentation: str) -> dict[str, str]:
    """Text of each argument in the section ``Args`` of a docstring."""
    section = re.search(r"^Args:\n((?:[ ]{4}.*\n?|\n)*)", documentation, flags=re.MULTILINE)
    lines = textwrap.dedent(section[1]) if section else ""
    entries = re.findall(r"^(\w+): (.*(?:\n[ ]+.*)*)", lines, flags=re.MULTILINE)
    return {name: " ".join(text.split()) for name, text in entries}
