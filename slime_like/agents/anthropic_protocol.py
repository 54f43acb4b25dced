"""The ``/v1/messages`` protocol, as Anthropic's clients use it."""

import json
import secrets
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from slime_like.agents.calls import Call, CallRejected, Content, Text, pair_results, parse, server_sent, text_of, wishes
from slime_like.agents.rendering import Message, ToolCall
from slime_like.agents.turns import Turn

_SIGNATURE = "policy"
"""Signature of thinking blocks. It is not checked, but clients drop blocks without one."""


class _Thinking(BaseModel):
    type: Literal["thinking"]
    thinking: str


class _Redacted(BaseModel):
    """Encrypted thinking of another model. It is left out of prompts."""

    type: Literal["redacted_thinking"]


class _ToolUse(BaseModel):
    type: Literal["tool_use"]
    id: str = ""
    name: str
    input: dict[str, Any]


class _ToolResult(BaseModel):
    type: Literal["tool_result"]
    tool_use_id: str = ""
    content: Content | None = None
    is_error: bool | None = None


_Block = Annotated[Text | _Thinking | _Redacted | _ToolUse | _ToolResult, Field(discriminator="type")]


class _Message(BaseModel):
    role: Literal["user", "assistant", "system"]
    content: str | list[_Block]


class _Tool(BaseModel):
    type: Literal["custom"] | None = None
    name: str
    description: str | None = None
    input_schema: dict[str, Any]


class _Request(BaseModel):
    model_config = ConfigDict(extra="allow")
    messages: list[_Message] = Field(min_length=1)
    system: Content | None = None
    model: str = ""
    stream: bool = False
    tools: list[_Tool] | None = None
    tool_choice: dict[str, Any] | None = None
    stop_sequences: list[str] | None = None


def read_call(body: Any) -> Call:
    """Parse a request's body. Raises ``CallRejected``."""
    request: _Request = parse(_Request, body)
    choice = (request.tool_choice or {}).get("type", "auto")
    system = [Message("system", text_of(request.system))] if request.system else []
    blocks = [each for message in request.messages if isinstance(message.content, list) for each in message.content]
    redacted = {"redacted_thinking": "left out"} if any(isinstance(block, _Redacted) for block in blocks) else {}
    return Call(
        messages=pair_results((*system, *(message for given in request.messages for message in _canonical(given)))),
        tools=tuple(_function(tool) for tool in (request.tools or ()) if choice != "none"),
        model=request.model,
        stream=request.stream,
        stop=tuple(filter(None, request.stop_sequences or ())),
        ignored={**wishes(request, choice), **redacted},
    )


def _canonical(message: _Message) -> Iterator[Message]:
    """Yield canonical messages. Each tool result becomes a separate message, and so does the text between results."""
    if isinstance(message.content, str):
        yield Message(message.role, message.content)
        return
    texts: list[str] = []
    thinking: list[str] = []
    calls: list[ToolCall] = []
    for block in message.content:
        if isinstance(block, _ToolResult):
            if texts:
                yield Message(message.role, "\n".join(texts))
                texts = []
            # Templates have no field for a failed tool, so the text says it.
            text = "Error: " * bool(block.is_error) + text_of(block.content)
            yield Message("tool", text, call_id=block.tool_use_id)
        elif isinstance(block, Text):
            texts.append(block.text)
        elif isinstance(block, _Thinking):
            thinking.append(block.thinking)
        elif isinstance(block, _ToolUse):
            calls.append(ToolCall(block.name, block.input, block.id))
    if texts or message.role == "assistant":
        yield Message(message.role, "\n".join(texts), tuple(calls), reasoning="\n".join(thinking))


def _function(tool: _Tool) -> dict[str, Any]:
    described = {"name": tool.name, "description": tool.description or "", "parameters": tool.input_schema}
    return {"type": "function", "function": described}


def answer(call: Call, turn: Turn) -> dict[str, Any]:
    reply = turn.forms[0]
    content: list[dict[str, Any]] = []
    if reply.reasoning:
        content.append({"type": "thinking", "thinking": reply.reasoning, "signature": _SIGNATURE})
    if reply.content:
        content.append({"type": "text", "text": reply.content})
    content += [
        {"type": "tool_use", "id": f"toolu_{secrets.token_hex(12)}", "name": one.name, "input": one.arguments}
        for one in reply.tool_calls
    ]
    stopped = next((stop for stop in call.stop if stop in turn.forms[1].content), None)
    ended = "max_tokens" if turn.generation.finish_reason == "length" else "stop_sequence" if stopped else "end_turn"
    return {
        "id": f"msg_{call.id}",
        "type": "message",
        "role": "assistant",
        "model": call.model,
        "content": content,
        "stop_reason": "tool_use" if reply.tool_calls else ended,
        "stop_sequence": stopped,
        "usage": {"input_tokens": len(turn.prompt.input.token_ids), "output_tokens": len(turn.generation.token_ids)},
    }


def waiting(call: Call, number: int) -> str:
    """Return a sign of life, before the answer's events."""
    return server_sent("ping", {})


def events(call: Call, turn: Turn, number: int) -> Iterator[str]:
    """Yield the answer as server-sent events, in one burst."""
    whole = answer(call, turn)
    content, usage = whole["content"], whole["usage"]
    stop = {name: whole[name] for name in ("stop_reason", "stop_sequence")}
    opened = {**whole, "content": [], **dict.fromkeys(stop), "usage": {**usage, "output_tokens": 0}}
    yield server_sent("message_start", {"message": opened})
    for index, block in enumerate(content):
        empty, deltas = _deltas(block)
        yield server_sent("content_block_start", {"index": index, "content_block": empty})
        for delta in deltas:
            yield server_sent("content_block_delta", {"index": index, "delta": delta})
        yield server_sent("content_block_stop", {"index": index})
    yield server_sent("message_delta", {"delta": stop, "usage": {"output_tokens": usage["output_tokens"]}})
    yield server_sent("message_stop", {})


def _deltas(block: dict[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    if block["type"] == "text":
        return {**block, "text": ""}, [{"type": "text_delta", "text": block["text"]}]
    if block["type"] == "thinking":
        thought = {"type": "thinking_delta", "thinking": block["thinking"]}
        signed = {"type": "signature_delta", "signature": block["signature"]}
        return {**block, "thinking": "", "signature": ""}, [thought, signed]
    arguments = json.dumps(block["input"], ensure_ascii=False)
    return {**block, "input": {}}, [{"type": "input_json_delta", "partial_json": arguments}]


def error_body(rejected: CallRejected) -> dict[str, Any]:
    """Build the body of a rejection as Anthropic's clients expect it, with the code in front of the problem."""
    kind = "request_too_large" if rejected.status == 413 else rejected.kind("api_error")
    return {"type": "error", "error": {"type": kind, "message": f"{rejected.code}: {rejected.problem}"}}
