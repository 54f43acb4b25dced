"""The ``/v1/chat/completions`` protocol, as OpenAI's clients use it."""

import json
import secrets
import time
from collections.abc import Iterator
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from slime_like.agents.calls import Call, CallRejected, Content, parse, text_of, unsupported, wishes
from slime_like.agents.messages import Message, ToolCall
from slime_like.agents.turns import Turn
from slime_like.config.sections import TEMPLATE_INPUTS


class _CalledFunction(BaseModel):
    name: str
    arguments: str


class _ToolCall(BaseModel):
    function: _CalledFunction


_ROLES = {"developer": "system", "function": "tool"}


class ChatMessage(BaseModel):
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Content | None = None
    tool_calls: list[_ToolCall] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None

    def canonical(self) -> Message:
        calls = tuple(ToolCall(c.function.name, arguments(c.function.arguments)) for c in self.tool_calls or ())
        reasoning = self.reasoning_content or self.reasoning or ""
        return Message(_ROLES.get(self.role, self.role), text_of(self.content), calls, reasoning=reasoning)


class _Function(BaseModel):
    model_config = ConfigDict(extra="allow")
    name: str


class _Tool(BaseModel):
    type: Literal["function"] = "function"
    function: _Function


class _Request(BaseModel):
    model_config = ConfigDict(extra="allow")
    messages: list[ChatMessage] = Field(min_length=1)
    model: str = ""
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    tools: list[_Tool] | None = None
    tool_choice: Any = None
    stop: str | list[str] | None = None
    n: int | None = None
    logprobs: bool | None = None
    logit_bias: dict[str, float] | None = None
    chat_template_kwargs: dict[str, Any] = {}


def read_call(body: Any) -> Call:
    """Parse a request's body. Raises ``CallRejected``."""
    request: _Request = parse(_Request, body)
    for name, value in (
        ("n", request.n not in (None, 1)),
        ("logprobs", request.logprobs),
        ("logit_bias", request.logit_bias),
        ("chat_template_kwargs", TEMPLATE_INPUTS & request.chat_template_kwargs.keys()),
    ):
        if value:
            raise unsupported(name, getattr(request, name))
    tools = [] if request.tool_choice == "none" else request.tools or []
    return Call(
        messages=tuple(message.canonical() for message in request.messages),
        tools=tuple(tool.model_dump() for tool in tools),
        model=request.model,
        stream=bool(request.stream),
        usage_chunk=bool((request.stream_options or {}).get("include_usage")),
        stop=tuple(filter(None, [request.stop] if isinstance(request.stop, str) else request.stop or ())),
        variables=request.chat_template_kwargs,
        ignored=wishes(request, request.tool_choice),
    )


def arguments(text: str) -> dict[str, Any] | str:
    """Parse arguments as a mapping, or return the text unchanged if it is not one."""
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
        "choices": [{"index": 0, "message": _reply(turn.forms[0]), "finish_reason": reason}],
        "usage": {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled},
    }


def _reply(message: Message) -> dict[str, Any]:
    reply: dict[str, Any] = {"role": "assistant", "content": message.content or None, "refusal": None}
    if message.reasoning:
        reply["reasoning_content"] = message.reasoning
    if not message.tool_calls:
        return {**reply, "content": message.content}
    calls = [
        {
            "id": f"call_{secrets.token_hex(12)}",
            "type": "function",
            "function": {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)},
        }
        for call in message.tool_calls
    ]
    return {**reply, "tool_calls": calls}


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
