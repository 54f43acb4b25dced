"""Arguments of tool calls that models write as plain text or as Python, converted to JSON values."""

import ast
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from slime_like.agents.messages import Tool, ToolCall

_OF_NO_TYPE = object()
"""Value that only a schema without constraints accepts."""

_KINDS: Mapping[type, Sequence[str]] = {
    type(None): ["null"], bool: ["boolean"], str: ["string"], int: ["integer", "number"], float: ["number"],
    list: ["array"], dict: ["object"],
}  # fmt: skip
_JSON_NAMES = {"true": True, "false": False, "null": None}
_PYTHON_NAMES = {"True": "true", "False": "false", "None": "null"}
_DEEPEST = 16


def typed_arguments(name: str, arguments: Mapping[str, Any], tools: Sequence[Tool]) -> dict[str, Any]:
    """Convert each text to a type that the tool's JSON schema declares. Text that fits no type stays text."""
    root = next((tool["function"].get("parameters") for tool in tools if tool["function"]["name"] == name), None)
    found = root.get("properties") if isinstance(root, Mapping) else None
    properties, typed = found if isinstance(found, Mapping) else {}, dict(arguments)
    for key, text in arguments.items():
        schema = properties.get(key)
        if isinstance(text, str) and schema is not None and not _accepts(schema, _OF_NO_TYPE, root):
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


def _accepts(schema: Any, value: Any, root: Any, depth: int = 0) -> bool:
    """Return whether a JSON schema allows the type of a value, or the value itself if it lists values.

    Bounds such as ``maximum`` are not checked: a number that exceeds one is still a number.
    """
    if not isinstance(schema, Mapping) or depth > _DEEPEST:
        return schema is not False
    if value is None and schema.get("nullable") is True:
        return True
    kinds = set(_KINDS.get(type(value), ()))
    kinds |= {"integer"} if isinstance(value, float) and value.is_integer() else set()
    declared = schema.get("type") or ("object" if "properties" in schema else "array" if "items" in schema else None)
    listed = [schema["const"]] if "const" in schema else schema.get("enum")
    some = [schema[name] for name in ("anyOf", "oneOf") if isinstance(schema.get(name), list)]
    every = [*(schema.get("allOf") or ()), *([_target(schema["$ref"], root)] if "$ref" in schema else ())]
    return (
        (declared is None or not kinds.isdisjoint([declared] if isinstance(declared, str) else declared))
        and (listed is None or any(type(one) is type(value) and one == value for one in listed))
        and all(any(_accepts(one, value, root, depth + 1) for one in choices) for choices in some)
        and all(_accepts(one, value, root, depth + 1) for one in every)
    )


def _target(reference: Any, root: Any) -> Any:
    """Return the schema at a pointer into ``root``. One that leads elsewhere constrains nothing."""
    start, *parts = str(reference).split("/")
    found = root if start == "#" else None
    for part in parts:
        found = found.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(found, Mapping) else None
    return found
