"""Tool calls in a model's text, in the format that the model was taught. Text that does not parse stays text."""

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from slime_like.agents.messages import Message, Tool, ToolCall

Parser = Callable[[str, Sequence[Tool]], ToolCall | None]
"""Parser of one ``<tool_call>`` block. Returns ``None`` if the block holds no call."""

_BLOCK = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
_FUNCTION = re.compile(r"\s*<function=([^>\n]+)>(.*)</function>\s*", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\n]+)>(.*?)</parameter>", re.DOTALL)


def parse_reply(parser: str, text: str, tools: Sequence[Tool]) -> Message:
    """Convert the model's turn to a message. Without tools, or with parser "none", the whole turn is text."""
    find = PARSERS[parser]
    if find is None or not tools:
        return Message("assistant", text)
    said, calls, end = [], [], 0
    for block in _BLOCK.finditer(text):
        if (call := find(block[1], tools)) is not None:
            said.append(text[end : block.start()])
            calls.append(call)
            end = block.end()
    if not calls:
        return Message("assistant", text)
    return Message("assistant", "".join([*said, text[end:]]).strip(), tuple(calls))


def parser_of_template(template: str) -> str:
    """Return the name of the parser for the format that a chat template shows the model."""
    if "<tool_call>" not in template:
        return "none"
    return "qwen3_coder" if "<function=" in template else "hermes"


def _hermes(block: str, tools: Sequence[Tool]) -> ToolCall | None:
    """Parse ``{"name": ..., "arguments": {...}}``."""
    try:
        call = json.loads(block)
    except (ValueError, RecursionError):
        return None
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return None
    arguments = call.get("arguments", {})
    return ToolCall(call["name"], arguments) if isinstance(arguments, dict) else None


def _qwen3_coder(block: str, tools: Sequence[Tool]) -> ToolCall | None:
    """Parse ``<function=NAME><parameter=KEY>VALUE</parameter></function>``. The tool's schema gives the value types."""
    function = _FUNCTION.fullmatch(block)
    if function is None:
        return None
    types = _types(function[1], tools)
    values = ((key, value.removeprefix("\n").removesuffix("\n")) for key, value in _PARAMETER.findall(function[2]))
    return ToolCall(function[1], {key: _typed(value, types.get(key)) for key, value in values})


def _types(name: str, tools: Iterable[Tool]) -> dict[str, Any]:
    """Return the parameter types in a tool's JSON schema; empty for other kinds of schemas."""
    for tool in tools:
        function = tool["function"]
        parameters = function.get("parameters")
        properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
        if function["name"] == name and isinstance(properties, Mapping):
            return {key: value.get("type") for key, value in properties.items() if isinstance(value, Mapping)}
    return {}


def _typed(value: str, kind: Any) -> Any:
    if kind in (None, "string"):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value


PARSERS: Mapping[str, Parser | None] = {"none": None, "hermes": _hermes, "qwen3_coder": _qwen3_coder}
