"""Chat messages that all protocols share. Request histories are compared and rendered in this form."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

Tool = Mapping[str, Any]
"""A tool's description in the form that chat templates accept: ``{"type": "function", "function": {"name": ...}}``."""


@dataclass(frozen=True)
class ToolCall:
    """A tool call, without its wire id.

    Attributes:
        arguments: a mapping, or the client's text if it is not a mapping.
    """

    name: str
    arguments: Mapping[str, Any] | str


@dataclass(frozen=True)
class Message:
    """One chat message.

    Attributes:
        role: "system", "user", "assistant" or "tool".
        is_sampled: whether the content is exactly what the model sampled, special tokens included. Clients never send
            it.
        reasoning: the model's thinking, apart from the content. It is not part of the key: many clients drop it from
            their histories.
    """

    role: str
    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    is_sampled: bool = False
    reasoning: str = ""

    @cached_property
    def key(self) -> str:
        """Key that is equal for messages with the same meaning. Order and spelling of arguments don't matter."""
        calls = [[call.name, call.arguments] for call in self.tool_calls]
        return json.dumps([self.role, self.content, calls], sort_keys=True)

    def for_template(self) -> dict[str, Any]:
        """Return the message in the form that Hugging Face chat templates accept."""
        shown: dict[str, Any] = {"role": self.role, "content": self.content}
        if self.reasoning:
            shown["reasoning_content"] = self.reasoning
        if self.tool_calls:
            shown["tool_calls"] = [
                {"type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in self.tool_calls
            ]
        return shown
