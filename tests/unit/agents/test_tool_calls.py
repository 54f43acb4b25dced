"""Tool calls in a model's text: what parses is a call, what does not stays text."""

from typing import Any

import pytest

from slime_like.agents.messages import Tool
from slime_like.agents.tool_calls import parse_reply, parser_of_template


def tool(name: str, **types: str) -> Tool:
    properties = {key: {"type": kind} for key, kind in types.items()}
    return {"type": "function", "function": {"name": name, "parameters": {"properties": properties}}}


TOOLS = [tool("add", a="integer", b="array", text="string"), {"type": "function", "function": {"name": "odd"}}]
JSON_CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
XML_CALL = (
    "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\n[2, 3]\n</parameter>\n"
    "<parameter=text>\n7\n\nlines\n</parameter>\n</function>\n</tool_call>"
)


@pytest.mark.parametrize(
    ("parser", "text", "content", "calls"),
    [
        ("none", JSON_CALL, JSON_CALL, []),
        ("hermes", " no call ", " no call ", []),
        ("hermes", JSON_CALL, "", [("add", {"a": 1})]),
        ("hermes", f"Let me.\n{JSON_CALL}\n{JSON_CALL}", "Let me.", [("add", {"a": 1})] * 2),
        ("hermes", '<tool_call>{"name": "add"}</tool_call>', "", [("add", {})]),
        ("hermes", "<tool_call>{", "<tool_call>{", []),
        ("hermes", "<tool_call>[]</tool_call>", "<tool_call>[]</tool_call>", []),
        ("hermes", '<tool_call>{"name": 1}</tool_call>', '<tool_call>{"name": 1}</tool_call>', []),
        ("hermes", f"<tool_call>x</tool_call>{JSON_CALL}", "<tool_call>x</tool_call>", [("add", {"a": 1})]),
        ("hermes", XML_CALL, XML_CALL, []),
        ("hermes", f"<tool_call>{'[' * 9999}</tool_call>", f"<tool_call>{'[' * 9999}</tool_call>", []),
        ("qwen3_coder", f"So:\n\n{XML_CALL}", "So:", [("add", {"a": 1, "b": [2, 3], "text": "7\n\nlines"})]),
        ("qwen3_coder", XML_CALL.replace("1", "one"), "", [("add", {"a": "one", "b": [2, 3], "text": "7\n\nlines"})]),
        ("qwen3_coder", "<tool_call><function=odd><parameter=a>1</parameter></function></tool_call>", "",
         [("odd", {"a": "1"})]),
        ("qwen3_coder", JSON_CALL, JSON_CALL, []),
    ],
)  # fmt: skip
def test_calls(parser: str, text: str, content: str, calls: list[tuple[str, Any]]) -> None:
    reply = parse_reply(parser, text, TOOLS)
    assert reply.content == content
    assert [(call.name, call.arguments) for call in reply.tool_calls] == calls


def test_without_tools_a_reply_is_text() -> None:
    assert parse_reply("hermes", JSON_CALL, []).content == JSON_CALL


@pytest.mark.parametrize(
    ("template", "parser"),
    [
        ("{{ m.content }}", "none"),
        ("<tool_call>{{ c | tojson }}", "hermes"),
        ("<tool_call><function=x>", "qwen3_coder"),
    ],
)
def test_the_parser_follows_the_template(template: str, parser: str) -> None:
    assert parser_of_template(template) == parser
