"""The ``/v1/responses`` protocol of OpenAI's clients, without state: each call sends its whole history."""

import itertools
import secrets
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Annotated, Any

from pydantic import AliasChoices, BaseModel, ConfigDict, Discriminator, Field, Tag

from slime_like.agents.calls import (
    Call,
    Content,
    Text,
    describe_tool,
    pair_results,
    parse,
    server_sent,
    text_of,
    wishes,
)
from slime_like.agents.openai_protocol import ChatMessage, arguments, error_body
from slime_like.agents.rendering import Message, Tool, ToolCall
from slime_like.agents.turns import Turn

__all__ = ["answer", "error_body", "events", "read_call", "waiting"]


class _Reasoning(BaseModel):
    summary: list[Text] = []
    content: list[Text] | None = None

    def canonical(self) -> Message:
        return Message("assistant", "", reasoning=text_of(self.content or self.summary))


class _ToolCall(BaseModel):
    type: str
    name: str
    arguments: str = Field(validation_alias=AliasChoices("arguments", "input"))
    call_id: str = ""

    def canonical(self) -> Message:
        given = arguments(self.arguments, self.type == "custom_tool_call")
        return Message("assistant", "", (ToolCall(self.name, given, self.call_id),))


class _Output(BaseModel):
    output: Content
    call_id: str = ""

    def canonical(self) -> Message:
        return Message("tool", text_of(self.output), call_id=self.call_id)


def _item_type(item: Any) -> Any:
    kind = str(item.get("type") or "message") if isinstance(item, dict) else None
    return kind and kind.replace("custom_tool_call", "function_call")


_Item = Annotated[
    Annotated[ChatMessage, Tag("message")]
    | Annotated[_Reasoning, Tag("reasoning")]
    | Annotated[_ToolCall, Tag("function_call")]
    | Annotated[_Output, Tag("function_call_output")],
    Discriminator(_item_type),
]


class _Function(BaseModel):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None


class _Request(BaseModel):
    model_config = ConfigDict(extra="allow")
    input: str | Annotated[list[_Item], Field(min_length=1)]
    instructions: str | None = None
    model: str = ""
    stream: bool | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None


def read_call(body: Any) -> Call:
    """Parse a request's body. Raises ``CallRejected``."""
    request: _Request = parse(_Request, body)
    system = [Message("system", request.instructions)] if request.instructions else []
    said = [Message("user", request.input)] if isinstance(request.input, str) else _messages(request.input)
    tools = [] if request.tool_choice == "none" else request.tools or []
    shown = tuple(_shown(tool) for tool in tools if tool.get("type") in ("function", "custom"))
    hosted = {str(tool.get("type")) for tool in tools} - {"function", "custom"}  # run by a service, or a namespace
    ignored = wishes(request, request.tool_choice) | ({"hosted_tools": ", ".join(sorted(hosted))} if hosted else {})
    custom = frozenset(tool["name"] for tool in tools if tool.get("type") == "custom")
    messages, stream = pair_results([*system, *said]), bool(request.stream)
    return Call(messages, shown, request.model, stream, text_tools=custom, ignored=ignored)


def _shown(tool: dict[str, Any]) -> Tool:
    function, is_text = parse(_Function, tool).model_dump(), tool["type"] == "custom"
    return describe_tool(tool if is_text else function, is_text)


def _messages(items: Iterable[Any]) -> list[Message]:
    """Join the items of each turn: reasoning, then text, then calls."""
    messages: list[Message] = []
    for item in items:
        part = item.canonical()
        last = messages[-1] if messages else None
        if last is None or not last.role == part.role == "assistant":
            messages.append(part)
        elif part.tool_calls or not (last.content or last.tool_calls):
            calls, reasoning = (*last.tool_calls, *part.tool_calls), last.reasoning + part.reasoning
            messages[-1] = replace(last, content=last.content + part.content, tool_calls=calls, reasoning=reasoning)
        else:
            messages.append(part)
    return messages


def answer(call: Call, turn: Turn) -> dict[str, Any]:
    prompt, sampled = len(turn.prompt.input.token_ids), len(turn.generation.token_ids)
    usage = {"input_tokens": prompt, "output_tokens": sampled, "total_tokens": prompt + sampled}
    details = {"cached_tokens": 0, "cache_write_tokens": 0}
    cut = turn.generation.finish_reason == "length"
    return {
        **_started(call),
        "status": "incomplete" if cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "output": list(_items(call, turn.forms[0], "incomplete" if cut else "completed")),
        "usage": {**usage, "input_tokens_details": details, "output_tokens_details": {"reasoning_tokens": 0}},
    }


def _started(call: Call) -> dict[str, Any]:
    response = {"id": f"resp_{call.id}", "object": "response", "created_at": int(time.time()), "model": call.model}
    return {**response, "status": "in_progress", "output": [], "parallel_tool_calls": True, "tool_choice": "auto",
            "tools": [], "metadata": {}, "error": None, "incomplete_details": None, "instructions": None}  # fmt: skip


def _items(call: Call, reply: Message, status: str) -> Iterator[dict[str, Any]]:
    """Yield the reply's items. Clients keep either the summary or the content of reasoning, so both have the text."""
    if text := reply.reasoning:
        parts = {
            "summary": [{"type": "summary_text", "text": text}],
            "content": [{"type": "reasoning_text", "text": text}],
        }
        yield {"type": "reasoning", "id": _new("rs"), **parts}
    if reply.content or not reply.tool_calls:
        content = [{"type": "output_text", "text": reply.content, "annotations": [], "logprobs": []}]
        yield {"type": "message", "id": _new("msg"), "role": "assistant", "status": status, "content": content}
    for one in reply.tool_calls:
        given = one.to_arguments(call.text_tools)
        kind = "custom_tool_call" if "input" in given else "function_call"
        yield {"type": kind, "id": _new("fc"), "call_id": _new("call"), "name": one.name, **given,
               "status": "completed"}  # fmt: skip


def _new(prefix: str) -> str:
    return f"{prefix}_{secrets.token_hex(12)}"


def waiting(call: Call, number: int) -> str:
    """Return the stream's first event (number 0), or a sign of life. Some clients count only events as such."""
    return _event(number, "response.in_progress" if number else "response.created", response=_started(call))


def events(call: Call, turn: Turn, number: int) -> Iterator[str]:
    """Yield the answer as server-sent events, in one burst. ``number`` events were sent before."""
    whole, numbers = answer(call, turn), itertools.count(number)
    for index, item in enumerate(whole["output"]):
        for kind, data in _filled(item):
            yield _event(next(numbers), kind, output_index=index, item_id=item["id"], **data)
    yield _event(next(numbers), f"response.{whole['status']}", response=whole)


def _filled(item: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    added = {name: "" if name in ("arguments", "input") else [] if name == "content" else item[name] for name in item}
    yield "response.output_item.added", {"item": {**added, "status": "in_progress"}}
    if item["type"] == "message":
        (part,) = item["content"]
        text = {"content_index": 0, "logprobs": []}
        yield "response.content_part.added", {"content_index": 0, "part": {**part, "text": ""}}
        yield "response.output_text.delta", {**text, "delta": part["text"]}
        yield "response.output_text.done", {**text, "text": part["text"]}
        yield "response.content_part.done", {"content_index": 0, "part": part}
    for field, kind in (("arguments", "function_call_arguments"), ("input", "custom_tool_call_input")):
        if field in item:
            yield f"response.{kind}.delta", {"delta": item[field]}
            yield f"response.{kind}.done", {field: item[field], "name": item["name"]}
    yield "response.output_item.done", {"item": item}


def _event(number: int, kind: str, **data: Any) -> str:
    return server_sent(kind, {"sequence_number": number, **data})
