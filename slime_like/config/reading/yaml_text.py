"""YAML as this project reads and writes it: safe, without YAML 1.1's surprises, and with the line of every key.

Plain scalars follow the core schema of YAML 1.2: ``off``, ``yes`` and ``2024-01-01`` are text and ``5e-4`` is a number.
"""

import re
from dataclasses import dataclass, field
from typing import Any

import yaml

from slime_like.errors import Problem

_PLAIN = (
    ("tag:yaml.org,2002:merge", r"<<", "<"),
    ("tag:yaml.org,2002:null", r"~|null|Null|NULL|", [*"~nN", ""]),
    ("tag:yaml.org,2002:bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("tag:yaml.org,2002:int", r"[-+]?(?:0|[1-9][0-9]*)", "-+0123456789"),
    (
        "tag:yaml.org,2002:float",
        r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
        "-+.0123456789",
    ),
)


_MOST_VALUES = 100_000


class _Loader(yaml.SafeLoader):
    """Aliases of aliases could stand for more values than any memory holds: each counts as what it stands for."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._sizes: dict[yaml.Node, int] = {}

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        """An alias inside of what it stands for has no end, and no place in a configuration."""
        node = super().compose_node(parent, index)
        if isinstance(node, yaml.CollectionNode) and node.end_mark is None:  # it is still being read
            raise yaml.MarkedYAMLError(problem="an alias inside its own anchor", problem_mark=node.start_mark)
        if node is not None and node not in self._sizes:
            items = node.value if isinstance(node, yaml.SequenceNode) else ()
            pairs = node.value if isinstance(node, yaml.MappingNode) else ()
            inner = (*items, *(one for pair in pairs for one in pair))
            self._sizes[node] = 1 + sum(self._sizes[one] for one in inner)
            if self._sizes[node] > _MOST_VALUES:
                problem = f"more than {_MOST_VALUES} values, counting what aliases stand for"
                raise yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark)
        return node


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True


for _kind in (_Loader, _Dumper):
    _kind.yaml_implicit_resolvers = {}  # none of YAML 1.1's
    for _tag, _pattern, _first_characters in _PLAIN:
        _kind.add_implicit_resolver(_tag, re.compile(rf"^(?:{_pattern})$"), _first_characters)


@dataclass(slots=True)
class Document:
    """A parsed YAML text.

    Attributes:
        data: plain Python values.
        lines: line number (from 1) of every key, by dotted path.
        problems: faults of the text itself, each beginning with ``name:line:``.
    """

    data: Any = None
    lines: dict[str, int] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)


def read_document(text: str, name: str) -> Document:
    """Parse one YAML document; faults are reported in ``problems``, never raised."""
    document = Document()
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is not None:
            _note_keys(node, "", name, document, set())
            document.data = loader.construct_document(node)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        document.problems.append(_syntax_problem(error, name))
    return document


def read_value(text: str) -> Any:
    """Parse one YAML value. Raises ``yaml.YAMLError``."""
    try:
        return yaml.load(text, Loader=_Loader)
    except (ValueError, RecursionError) as error:
        raise yaml.MarkedYAMLError(problem=_reason(error)) from error


def write_text(data: Any) -> str:
    """YAML text which ``read_document`` reads back as ``data``; ASCII, since PyYAML loses some characters else."""
    return yaml.dump(data, Dumper=_Dumper, sort_keys=False, width=120)


def _note_keys(node: yaml.Node, prefix: str, name: str, document: Document, seen: set[int]) -> None:
    if id(node) in seen:  # an alias: its keys are noted where the anchor stands
        return
    seen.add(id(node))
    if isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            _note_keys(item, f"{prefix}{index}.", name, document, seen)
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            path, line = f"{prefix}{key.value}", key.start_mark.line + 1
            if path in document.lines:
                first = document.lines[path]
                sentence = f"{name}:{line}: {path} is set a second time (first in line {first}); keep one of the two"
                document.problems.append(Problem("field-repeated", sentence, path))
            document.lines.setdefault(path, line)
            _note_keys(value, f"{path}.", name, document, seen)


def _reason(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return "nested too deep"
    return getattr(error, "problem", None) or str(error).splitlines()[0]


def _syntax_problem(error: Exception, name: str) -> Problem:
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    reason = _reason(error)
    where = f"{name}:{mark.line + 1}" if mark is not None else name
    return Problem("yaml-syntax", f"{where}: not valid YAML ({reason}); correct this line")
