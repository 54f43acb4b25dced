"""Arguments of tool calls that models write as plain text or as Python, converted to JSON values."""

import ast
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from typing import Any

from slime_like.agents.messages import Tool, ToolCall

_JSON_NAMES = {"true": True, "false": False, "null": None}
_PYTHON_NAMES = {"True": "true", "False": "false", "None": "null"}


def typed_arguments(name: str, arguments: Mapping[str, Any], tools: Sequence[Tool]) -> dict[str, Any]:
    """Convert each text to a type that the tool's JSON schema declares. Text that fits no type stays text."""
    root = next((tool["function"].get("parameters") for tool in tools if tool["function"]["name"] == name), None)
    found = root.get("properties") if isinstance(root, Mapping) else None
    properties, typed = found if isinstance(found, Mapping) else {}, dict(arguments)
    for key, text in arguments.items():
        schema = properties.get(key)  # one without constraints accepts any object
        if isinstance(text, str) and schema is not None and not _accepts(schema, object(), root):
            typed[key] = next((value for value in _readings(text) if _accepts(schema, value, root)), text)
    return typed


def python_calls(text: str) -> list[ToolCall]:
    """Parse calls with keyword arguments, ``[f(a=1), g()]``. Raises ``ValueError`` for anything else."""
    try:
        body: Any = _JsonNames().visit(ast.parse(text.strip(), mode="eval")).body
        found = [_dashed(node) for node in body.elts]
        calls = [ToolCall(name, {k.arg: ast.literal_eval(k.value) for k in c.keywords}) for name, c in found]
        json.dumps([call.arguments for call in calls], ensure_ascii=False, allow_nan=False).encode()
    except (SyntaxError, AttributeError, TypeError, RecursionError, MemoryError) as error:
        raise ValueError(f"not a list of calls: {error}") from error
    if not calls or any(one.args or any(k.arg is None for k in one.keywords) for _, one in found):
        raise ValueError("not a list of calls with keyword arguments")
    return calls


def _dashed(node: Any) -> tuple[str, Any]:
    """Return a call's name and the call. Python reads the dashes of a name as subtraction."""
    if not isinstance(node, ast.BinOp) or not isinstance(node.op, ast.Sub):
        return ast.unparse(node.func), node
    name, call = _dashed(node.right)
    return f"{ast.unparse(node.left).replace(' - ', '-')}-{name}", call


class _JsonNames(ast.NodeTransformer):
    """Replaces JSON's constants, which templates write inside objects, by Python's."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(_JSON_NAMES[node.id]) if node.id in _JSON_NAMES else node


def _readings(text: str) -> Iterator[Any]:
    """Yield the values that a text may mean. A string comes before a number, since both are written alike."""
    word = _PYTHON_NAMES.get(text.strip(), text.strip())
    if word == "null":
        yield None
    yield text
    with suppress(ValueError, RecursionError):
        value = json.loads(word)
        json.dumps(value, allow_nan=False)
        yield value


def _accepts(schema: Any, value: Any, root: Any) -> bool:
    """Return whether a JSON schema in ``root`` allows the type of a value, or the value itself if it lists values.

    Bounds such as ``maximum`` are not checked: a number that exceeds one is still a number.
    """
    from jsonschema.exceptions import UnknownType
    from referencing import Registry
    from referencing.exceptions import Unresolvable

    if value is None and isinstance(schema, Mapping) and schema.get("nullable") is True:  # OpenAPI's
        return True
    try:  # this registry downloads nothing
        return bool(_type_validator()(root, registry=Registry()).evolve(schema=schema).is_valid(value))
    except (UnknownType, Unresolvable, RecursionError):
        return False


@cache
def _type_validator() -> Any:
    from jsonschema import Draft202012Validator
    from jsonschema.validators import create

    def implied(kind: str) -> Any:
        return lambda each, _, value, schema: rules["type"](each, schema.get("type", kind), value, schema)

    rules = Draft202012Validator.VALIDATORS
    used = {name: rules[name] for name in ("$ref", "allOf", "anyOf", "const", "enum", "type")}
    used |= {"oneOf": rules["anyOf"], "properties": implied("object"), "items": implied("array")}
    return create(Draft202012Validator.META_SCHEMA, used, type_checker=Draft202012Validator.TYPE_CHECKER)
