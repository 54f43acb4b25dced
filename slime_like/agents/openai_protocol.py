"""The ``/v1/chat/completions`` protocol, as OpenAI's clients use it."""

import json
import secrets
import time
from collections.abc import Iterator
from typing import Any, Literal

from pydantic import AliasChoices, BaseModel, ConfigDict, Field

from slime_like.agents.calls import Call, CallRejected, Content, describe_tool, pair_results, parse, text_of, wishes
from slime_like.agents.rendering import TEXT, Message, ToolCall
from slime_like.agents.turns import Turn
from slime_like.config.sections import TEMPLATE_INPUTS


class _Called(BaseModel):
    name: str
    arguments: str = Field(validation_alias=AliasChoices("arguments", "input"))


class _ToolCall(BaseModel):
    id: str | None = None
    type: str | None = None
    function: _Called = Field(validation_alias=AliasChoices("function", "custom"))

    def canonical(self) -> ToolCall:
        given = arguments(self.function.arguments, self.type == "custom")
        return ToolCall(self.function.name, given, self.id or "")


_ROLES = {"developer": "system", "function": "tool"}


class ChatMessage(BaseModel):
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Content | None = None
    tool_calls: list[_ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None

    def canonical(self) -> Message:
        role, calls = _ROLES.get(self.role, self.role), tuple(call.canonical() for call in self.tool_calls or ())
        reasoning, call_id = self.reasoning_content or self.reasoning or "", self.tool_call_id or ""
        return Message(role, text_of(self.content), calls, reasoning=reasoning, call_id=call_id)


class _Function(BaseModel):
    model_config = ConfigDict(extra="allow")
    name: str


class _Tool(BaseModel):
    type: Literal["function", "custom"] = "function"
    function: _Function = Field(validation_alias=AliasChoices("function", "custom"))


class _Request(BaseModel):
    model_config = ConfigDict(extra="allow")
    messages: list[ChatMessage] = Field(min_length=1)
    model: str = ""
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    tools: list[_Tool] | None = None
    tool_choice: Any = None
    stop: str | list[str] | None = None
    chat_template_kwargs: dict[str, Any] = {}


def read_call(body: Any) -> Call:
    """Parse a request's body. Raises ``CallRejected``."""
    request: _Request = parse(_Request, body)
    if taken := TEMPLATE_INPUTS & request.chat_template_kwargs.keys():
        problem = f"chat_template_kwargs: {', '.join(sorted(taken))} comes from the call's other fields; leave it out"
        raise CallRejected(400, "unsupported_parameter", problem)
    tools = [] if request.tool_choice == "none" else request.tools or []
    return Call(
        messages=pair_results(message.canonical() for message in request.messages),
        tools=tuple(describe_tool(tool.function.model_dump(), tool.type == "custom") for tool in tools),
        model=request.model,
        stream=bool(request.stream),
        usage_chunk=bool((request.stream_options or {}).get("include_usage")),
        stop=tuple(filter(None, [request.stop] if isinstance(request.stop, str) else request.stop or ())),
        variables=request.chat_template_kwargs,
        text_tools=frozenset(tool.function.name for tool in tools if tool.type == "custom"),
        ignored=wishes(request, request.tool_choice),
    )


def arguments(text: str, of_text: bool = False) -> dict[str, Any] | str:
    """Parse arguments as a mapping, or return the text unchanged if it is not one. ``of_text``: of a custom tool."""
    if of_text:
        return {TEXT: text}
    try:
        value = json.loads(text)
    except ValueError:
        return text
    return value if isinstance(value, dict) else text


def answer(call: Call, turn: Turn) -> dict[str, Any]:
    prompt, sampled = len(turn.prompt.input.token_ids), len(turn.generation.token_ids)
    reason = "tool_calls" if turn.forms[0].tool_calls else turn.generation.finish_reason
    return {
        "id": f"chatcmpl-{call.id}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": call.model,
        "choices": [{"index": 0, "message": _reply(call, turn.forms[0]), "finish_reason": reason}],
        "usage": {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled},
    }


def _reply(call: Call, message: Message) -> dict[str, Any]:
    content = message.content or None if message.tool_calls else message.content
    reply: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
    if message.reasoning:
        reply["reasoning_content"] = message.reasoning
    for one in message.tool_calls:
        given = one.to_arguments(call.text_tools)
        kind = "custom" if "input" in given else "function"
        called = {"id": f"call_{secrets.token_hex(12)}", "type": kind, kind: {"name": one.name, **given}}
        reply.setdefault("tool_calls", []).append(called)
    return reply


def waiting(call: Call, number: int) -> str:
    """Return a sign of life, before the answer's events. OpenAI's clients skip comments."""
    return ": waiting\n\n"


def events(call: Call, turn: Turn, number: int) -> Iterator[str]:
    """Yield the answer as server-sent events, in one burst."""
    whole = answer(call, turn)
    (choice,) = whole.pop("choices")
    usage = whole.pop("usage")
    message = choice["message"]
    delta = {name: value for name, value in message.items() if name != "tool_calls"}
    if "tool_calls" in message:
        delta["tool_calls"] = [{"index": index, **one} for index, one in enumerate(message["tool_calls"])]
    chunks: list[dict[str, Any]] = [
        {"choices": [{"index": 0, "delta": delta, "finish_reason": None}]},
        {"choices": [{"index": 0, "delta": {}, "finish_reason": choice["finish_reason"]}]},
        *([{"choices": [], "usage": usage}] if call.usage_chunk else []),
    ]
    for chunk in chunks:
        data = json.dumps({**whole, "object": "chat.completion.chunk", **chunk}, ensure_ascii=False)
        yield f"data: {data}\n\n"
    yield "data: [DONE]\n\n"


def error_body(rejected: CallRejected) -> dict[str, Any]:
    """Build the body of a rejection as OpenAI's clients expect it."""
    kind = rejected.kind("server_error")
    return {"error": {"message": rejected.problem, "type": kind, "param": None, "code": rejected.code}}


def model_entry(name: str) -> dict[str, Any]:
    """Build the answer of ``/v1/models/NAME``, with the keys of both OpenAI's and Anthropic's protocol."""
    entry = {"id": name, "object": "model", "created": 0, "owned_by": "slime-like"}
    return {**entry, "type": "model", "display_name": name, "created_at": "1970-01-01T00:00:00Z"}
