"""Chat messages, the same for every protocol: what a request's history is compared and rendered by."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

Tool = Mapping[str, Any]
"""A tool's description as chat templates take it: ``{"type": "function", "function": {"name": ...}}``."""


@dataclass(frozen=True)
class ToolCall:
    """A call of a tool, without the id that names it on the wire.

    Attributes:
        arguments: a mapping; text where the client sent what is none.
    """

    name: str
    arguments: Mapping[str, Any] | str


@dataclass(frozen=True)
class Message:
    """One message.

    Attributes:
        role: "system", "user", "assistant" or "tool".
        is_sampled: the content is what the model sampled, special tokens included, which a client never sends.
    """

    role: str
    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    is_sampled: bool = False

    @cached_property
    def key(self) -> str:
        """Equal for messages that mean the same: the order and spelling of arguments does not count."""
        calls = [[call.name, call.arguments] for call in self.tool_calls]
        return json.dumps([self.role, self.content, calls], sort_keys=True)

    def for_template(self) -> dict[str, Any]:
        """The message in the form that chat templates of Hugging Face take."""
        shown: dict[str, Any] = {"role": self.role, "content": self.content}
        if self.tool_calls:
            shown["tool_calls"] = [
                {"type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in self.tool_calls
            ]
        return shown
