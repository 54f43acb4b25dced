"""Prompts and conversations of rows, as chat messages in one form for all kinds of files."""

import re
from difflib import get_close_matches
from typing import Any

from slime_like.data.rows import Row, strict_json

TOOLS_KEY = "tools"
"""Row key of the tool definitions of a prompt or a conversation."""

_ROLES = ("system", "developer", "user", "assistant", "tool")
_ELSEWHERE = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "bot": "assistant", "ai": "assistant"}
"""Role names that other files use."""
_SPELLED = re.compile(rf"""['"](?:role|from)['"]\s*:\s*['"](?:{"|".join((*_ROLES, *_ELSEWHERE))})['"]""")
"""A message's role in text that spells a list of messages, as JSON or otherwise."""

THINKING_KEY = "reasoning_content"
"""Key of a message's thinking after reading."""
THINKING_KEYS = (THINKING_KEY, "reasoning", "thinking", "thought", "reasoning_text")
_LOSS_KEY = "loss"
_SWITCHES = (_LOSS_KEY, "loss_mask", "step_loss_mask", "weight", "trainable", "train")
"""Keys that say whether a message carries loss."""

Message = dict[str, Any]
Messages = list[Message]


def read_conversation(row: Row, key: str) -> tuple[Messages, list[dict[str, Any]] | None]:
    """Return the messages under ``key``, and the row's tools if it has any. One key says which messages carry loss.

    Raises ``DataError`` if there is no list of messages, or none of the assistant carries loss.
    """
    if row.get(key) is None:
        remedy = "give every row one; train on demonstrations under data.response_key in another run"
        raise row.fault("no-conversation", f"has no {key!r}", remedy)
    messages = read_messages(row, key, "bad-messages")
    for number, message in enumerate(messages, start=1):
        switches = {name: message.pop(name) for name in _SWITCHES if name in message}
        where, switch = f"{key!r}, message {number}", None
        if switches:
            switch = _agreed(row, "bad-messages", where, switches)
            message[_LOSS_KEY] = bool(switch)
        if switch not in (None, 0, 1) or (switch and message["role"] != "assistant"):
            problem = f"{where} has a loss weight of {switch!r}; it can be 0 or, for the assistant's turns, 1"
            raise row.fault("bad-messages", problem)
    if not any(map(is_trained, messages)):
        roles = ", ".join(sorted({message["role"] for message in messages}))
        problem = f"{key!r} has no message of the assistant that carries loss; its roles: {roles}"
        raise row.fault("no-assistant-turn", problem, "correct roles and loss switches, or remove the row")
    return messages, read_tools(row)


def is_trained(message: Message) -> bool:
    return bool(message["role"] == "assistant" and message.get(_LOSS_KEY, True))


def _agreed(row: Row, code: str, where: str, found: dict[str, Any]) -> Any:
    """Return the value that all keys have, or ``None`` if there are none."""
    value = next(iter(found.values()), None)
    if any(other != value for other in found.values()):
        raise row.fault(code, f"{where}: {' and '.join(map(repr, found))} differ", "keep one of them")
    return value


def spells_messages(text: str) -> bool:
    """Return whether a text is a written list of messages. A model would be asked with its braces and quotes."""
    text = text.strip()
    return text[:1] in "[{(" and _SPELLED.search(text) is not None


def read_messages(row: Row, key: str, code: str) -> Messages:
    """Return the messages under ``key``, which may be a list or its JSON.

    ShareGPT messages, with ``from`` and ``value``, are converted to ``role`` and ``content``. Keys without a value are
    dropped, text parts are joined by line breaks, tool-call arguments in JSON are parsed, and thinking gets one key.
    Raises ``DataError`` with this ``code`` if there is no list of messages.
    """
    given = _parsed(row.get(key))
    if not isinstance(given, list) or not given:
        text = "text, or " if code == "bad-prompt" else ""
        raise row.fault(code, f"{key!r} must be {text}a list of chat messages, or its JSON")
    return [_message(row, code, f"{key!r}, message {number}", each) for number, each in enumerate(given, start=1)]


def _message(row: Row, code: str, where: str, given: Any) -> Message:
    message = {key: value for key, value in given.items() if value is not None} if isinstance(given, dict) else {}
    if "role" not in message and isinstance(message.get("from"), str) and "value" in message:
        role = message.pop("from")
        message = {"role": _ELSEWHERE.get(role, role), "content": message.pop("value"), **message}
    if not isinstance(message.get("role"), str):
        raise row.fault(code, f"{where} must be a mapping with a `role`")
    # Templates render a misspelled role, and the model would learn it. Other roles are up to the template.
    role = message["role"]
    near = get_close_matches(role.lower(), _ROLES, n=1, cutoff=0.75)
    if role != (meant := _ELSEWHERE.get(role.lower()) or next(iter(near), role)):
        raise row.fault(code, f"{where}: the role {role!r} is unknown; did you mean {meant!r}?")
    if message.get("tool_calls"):
        message["tool_calls"] = _tool_calls(row, code, where, message["tool_calls"])
    else:
        message.pop("tool_calls", None)
    if message["role"] == "assistant":
        given = {name: message.pop(name) for name in THINKING_KEYS if name in message}
        thinking = _agreed(row, code, where, {name: value for name, value in given.items() if value})
        if not isinstance(thinking, str | None):
            raise row.fault(code, f"{where} must have text in its thinking")
        message |= {} if thinking is None else {THINKING_KEY: thinking}
    silent = message["role"] == "assistant" and "tool_calls" in message
    message["content"] = _text(row, code, where, message.get("content", "" if silent else None))
    return message


def _text(row: Row, code: str, where: str, content: Any) -> str:
    """Return the text of a message's content: a text, or a list of text parts."""
    texts = [content] if isinstance(content, str) else []
    for part in content if isinstance(content, list) else ():
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        if kind != "text" or not isinstance(part.get("text"), str):
            problem = f"{where} has a part in `content` (type {kind!r}) that is not text"
            raise row.fault(code, problem, "models are trained on text only; remove the part or the row")
        texts.append(part["text"])
    if not texts:
        raise row.fault(code, f"{where} must have text in `content`")
    return "\n".join(texts)


def _tool_calls(row: Row, code: str, where: str, given: Any) -> list[dict[str, Any]]:
    calls = []
    for call in given if isinstance(given, list) else [None]:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(call, dict) or not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise row.fault(code, f"{where}: each of `tool_calls` must have a `function` with a `name`")
        arguments = _parsed(function.get("arguments", {}))
        if not isinstance(arguments, dict):
            raise row.fault(code, f"{where}: `arguments` of {function['name']!r} must be a mapping, or its JSON")
        calls.append({**call, "function": {**function, "arguments": arguments}})
    return calls


def read_tools(row: Row) -> list[dict[str, Any]] | None:
    """Return the row's tool definitions, which may be in JSON, or ``None`` if it has none."""
    tools = _parsed(row.get(TOOLS_KEY))
    if not tools and isinstance(tools, list | None):
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise row.fault("bad-tools", f"{TOOLS_KEY!r} must be a list of mappings, or its JSON")
    return tools


def _parsed(value: Any) -> Any:
    """Parse JSON text. Return other values and other text unchanged."""
    if not isinstance(value, str):
        return value
    try:
        return strict_json(value)
    except (ValueError, RecursionError):
        return value
