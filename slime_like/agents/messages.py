"""Chat messages and tool calls that all protocols share. Request histories are compared and rendered in this form.

``typed_arguments`` and ``python_calls`` convert calls that models write as plain text or as Python.
"""

import ast
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache, cached_property
from hashlib import blake2b
from typing import Any

Tool = Mapping[str, Any]
"""A tool's description in the form that chat templates accept: ``{"type": "function", "function": {"name": ...}}``."""

TEXT = "input"
"""Parameter under which the model writes the text of a custom tool."""

_JSON_NAMES = {"true": True, "false": False, "null": None}
_PYTHON_NAMES = {"True": "true", "False": "false", "None": "null"}


@dataclass(frozen=True)
class ToolCall:
    """A tool call. ``arguments`` is the client's text if it is not a mapping, and ``id`` is the client's, if any."""

    name: str
    arguments: Mapping[str, Any] | str
    id: str = field(default="", compare=False)

    def to_arguments(self, text_tools: Collection[str]) -> dict[str, str]:
        """Return the arguments as JSON, or the text of a custom tool, which gets arguments of another form as JSON."""
        arguments = json.dumps(self.arguments, ensure_ascii=False)
        if self.name not in text_tools:
            return {"arguments": arguments}
        text = self.arguments.get(TEXT) if isinstance(self.arguments, Mapping) and len(self.arguments) == 1 else None
        return {"input": text if isinstance(text, str) else arguments}

    def function(self, as_text: bool) -> dict[str, Any]:
        is_written = as_text and not isinstance(self.arguments, str)
        return {"name": self.name, "arguments": json.dumps(self.arguments) if is_written else self.arguments}


@dataclass(frozen=True)
class Message:
    """One chat message.

    Attributes:
        role: "system", "user", "assistant" or "tool".
        is_sampled: whether the content is exactly what the model sampled, special tokens included. Clients never send
            it.
        reasoning: the model's thinking, apart from the content. It is not part of the key: many clients drop it from
            their histories.
        call_id, name: id and name of the call that a tool's result answers (``pair_results``).
    """

    role: str
    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    is_sampled: bool = False
    reasoning: str = ""
    call_id: str = ""
    name: str = ""

    @cached_property
    def key(self) -> bytes:
        """Key that is equal for messages with the same meaning. Order and spelling of arguments don't matter."""
        calls = [[call.name, call.arguments] for call in self.tool_calls]
        meaning = json.dumps([self.role, self.content, calls, self.call_id], sort_keys=True)
        return blake2b(meaning.encode("ascii"), digest_size=16).digest()

    def for_template(self, text_arguments: bool = False) -> dict[str, Any]:
        """Return the message in the form that Hugging Face chat templates accept, with arguments as JSON if asked."""
        shown: dict[str, Any] = {"role": self.role, "content": self.content}
        if self.name:  # templates may need to know which call a tool answers
            shown |= {"tool_call_id": self.call_id, "name": self.name}
        if self.reasoning:
            shown |= dict.fromkeys(("reasoning_content", "reasoning"), self.reasoning)
            if not (self.content and self.tool_calls):  # gpt-oss rejects all three together
                shown["thinking"] = self.reasoning
        if self.tool_calls:
            shown["tool_calls"] = [
                {"type": "function", "id": f"functions.{call.name}:{index}", "function": call.function(text_arguments)}
                for index, call in enumerate(self.tool_calls)
            ]
        return shown


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
