"""The ``/v1/messages`` protocol, as Anthropic's clients use it."""

import json
import secrets
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from slime_like.agents.calls import Call, CallRejected, parse, unsupported, wishes
from slime_like.agents.messages import Message, ToolCall
from slime_like.agents.turns import Turn


class _Text(BaseModel):
    type: Literal["text"]
    text: str


class _Thinking(BaseModel):
    """Thinking from another model. This endpoint never sends it, and leaves it out of prompts."""

    type: Literal["thinking", "redacted_thinking"]


class _ToolUse(BaseModel):
    type: Literal["tool_use"]
    name: str
    input: dict[str, Any]


class _ToolResult(BaseModel):
    type: Literal["tool_result"]
    content: str | list[_Text] | None = None


_Block = Annotated[_Text | _Thinking | _ToolUse | _ToolResult, Field(discriminator="type")]


class _Message(BaseModel):
    role: Literal["user", "assistant"]
    content: str | list[_Block]


class _Tool(BaseModel):
    name: str
    description: str | None = None
    input_schema: dict[str, Any]


class _Choice(BaseModel):
    type: str


class _Request(BaseModel):
    model_config = ConfigDict(extra="allow")
    messages: list[_Message] = Field(min_length=1)
    system: str | list[_Text] | None = None
    model: str = ""
    stream: bool = False
    tools: list[_Tool] | None = None
    tool_choice: _Choice | None = None
    stop_sequences: list[str] | None = None


def read_call(body: Any) -> Call:
    """Parse a request's body. Raises ``CallRejected``."""
    request: _Request = parse(_Request, body)
    choice = "auto" if request.tool_choice is None else request.tool_choice.type
    if request.messages[-1].role == "assistant":
        raise unsupported("messages", "a last message of role assistant")
    system = [Message("system", _text(request.system))] if request.system else []
    return Call(
        messages=(*system, *(message for given in request.messages for message in _canonical(given))),
        tools=tuple(_function(tool) for tool in (request.tools or ()) if choice != "none"),
        model=request.model,
        stream=request.stream,
        stop=tuple(filter(None, request.stop_sequences or ())),
        ignored=wishes(request, None if choice in ("auto", "none") else choice),
    )


def _text(content: str | list[_Text] | None) -> str:
    return "\n".join(block.text for block in content or ()) if not isinstance(content, str) else content


def _canonical(message: _Message) -> Iterator[Message]:
    """Yield canonical messages. Each tool result becomes a separate message, and so does the text between results."""
    if isinstance(message.content, str):
        yield Message(message.role, message.content)
        return
    texts: list[str] = []
    calls: list[ToolCall] = []
    for block in message.content:
        if isinstance(block, _ToolResult):
            if texts:
                yield Message(message.role, "\n".join(texts))
                texts = []
            yield Message("tool", _text(block.content))
        elif isinstance(block, _Text):
            texts.append(block.text)
        elif isinstance(block, _ToolUse):
            calls.append(ToolCall(block.name, block.input))
    if texts or message.role == "assistant":
        yield Message(message.role, "\n".join(texts), tuple(calls))


def _function(tool: _Tool) -> dict[str, Any]:
    described = {"name": tool.name, "description": tool.description or "", "parameters": tool.input_schema}
    return {"type": "function", "function": described}


def answer(call: Call, turn: Turn) -> dict[str, Any]:
    """Build the non-streaming answer."""
    reply = turn.forms[0]
    content: list[dict[str, Any]] = [{"type": "text", "text": reply.content}] if reply.content else []
    content += [
        {"type": "tool_use", "id": f"toolu_{secrets.token_hex(12)}", "name": one.name, "input": one.arguments}
        for one in reply.tool_calls
    ]
    stopped = next((stop for stop in call.stop if stop in turn.forms[1].content), None)
    ended = "max_tokens" if turn.generation.finish_reason == "length" else "stop_sequence" if stopped else "end_turn"
    return {
        "id": f"msg_{secrets.token_hex(12)}",
        "type": "message",
        "role": "assistant",
        "model": call.model,
        "content": content,
        "stop_reason": "tool_use" if reply.tool_calls else ended,
        "stop_sequence": stopped,
        "usage": {"input_tokens": len(turn.prompt.token_ids), "output_tokens": len(turn.generation.token_ids)},
    }


def events(call: Call, turn: Turn) -> Iterator[str]:
    """Yield the answer as server-sent events, in one burst."""
    whole = answer(call, turn)
    content, usage = whole["content"], whole["usage"]
    stop = {name: whole[name] for name in ("stop_reason", "stop_sequence")}
    opened = {**whole, "content": [], **dict.fromkeys(stop), "usage": {**usage, "output_tokens": 0}}
    yield _event("message_start", {"message": opened})
    for index, block in enumerate(content):
        if block["type"] == "text":
            empty, delta = {**block, "text": ""}, {"type": "text_delta", "text": block["text"]}
        else:
            arguments = json.dumps(block["input"], ensure_ascii=False)
            empty, delta = {**block, "input": {}}, {"type": "input_json_delta", "partial_json": arguments}
        yield _event("content_block_start", {"index": index, "content_block": empty})
        yield _event("content_block_delta", {"index": index, "delta": delta})
        yield _event("content_block_stop", {"index": index})
    yield _event("message_delta", {"delta": stop, "usage": {"output_tokens": usage["output_tokens"]}})
    yield _event("message_stop", {})


def _event(kind: str, data: dict[str, Any]) -> str:
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **data}, ensure_ascii=False)}\n\n"


_KINDS = {
    401: "authentication_error", 403: "permission_error", 404: "not_found_error", 413: "request_too_large",
    429: "rate_limit_error",
}  # fmt: skip


def error_body(rejected: CallRejected) -> dict[str, Any]:
    """Build the body of a rejection as Anthropic's clients expect it, with the code in front of the problem."""
    kind = _KINDS.get(rejected.status, "invalid_request_error" if rejected.status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": f"{rejected.code}: {rejected.problem}"}}
