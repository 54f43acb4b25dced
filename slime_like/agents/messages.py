"""Chat messages that all protocols share. Request histories are compared and rendered in this form."""

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import blake2b
from typing import Any

Tool = Mapping[str, Any]
"""A tool's description in the form that chat templates accept: ``{"type": "function", "function": {"name": ...}}``."""

TEXT = "input"
"""Parameter under which the model writes the text of a custom tool."""


@dataclass(frozen=True)
class ToolCall:
    """A tool call. ``arguments`` is the client's text if it is not a mapping, and ``id`` is the client's, if any."""

    name: str
    arguments: Mapping[str, Any] | str
    id: str = field(default="", compare=False)

    def given(self, text_tools: Collection[str]) -> dict[str, str]:
        """Return the arguments as JSON, or the text of a custom tool, which gets arguments of another form as JSON."""
        arguments = json.dumps(self.arguments, ensure_ascii=False)
        if self.name not in text_tools:
            return {"arguments": arguments}
        text = self.arguments.get(TEXT) if isinstance(self.arguments, Mapping) and len(self.arguments) == 1 else None
        return {"input": text if isinstance(text, str) else arguments}

    def function(self, as_text: bool) -> dict[str, Any]:
        is_written = as_text and not isinstance(self.arguments, str)
        return {"name": self.name, "arguments": json.dumps(self.arguments) if is_written else self.arguments}


@dataclass(frozen=True)
class Message:
    """One chat message.

    Attributes:
        role: "system", "user", "assistant" or "tool".
        is_sampled: whether the content is exactly what the model sampled, special tokens included. Clients never send
            it.
        reasoning: the model's thinking, apart from the content. It is not part of the key: many clients drop it from
            their histories.
        call_id, name: id and name of the call that a tool's result answers (``pair_results``).
    """

    role: str
    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    is_sampled: bool = False
    reasoning: str = ""
    call_id: str = ""
    name: str = ""

    @cached_property
    def key(self) -> bytes:
        """Key that is equal for messages with the same meaning. Order and spelling of arguments don't matter."""
        calls = [[call.name, call.arguments] for call in self.tool_calls]
        meaning = json.dumps([self.role, self.content, calls, self.call_id], sort_keys=True)
        return blake2b(meaning.encode("ascii"), digest_size=16).digest()

    def for_template(self, text_arguments: bool = False) -> dict[str, Any]:
        """Return the message in the form that Hugging Face chat templates accept, with arguments as JSON if asked."""
        shown: dict[str, Any] = {"role": self.role, "content": self.content}
        if self.name:  # templates may need to know which call a tool answers
            shown |= {"tool_call_id": self.call_id, "name": self.name}
        if self.reasoning:
            shown |= dict.fromkeys(("reasoning_content", "reasoning"), self.reasoning)
            if not (self.content and self.tool_calls):  # gpt-oss rejects all three together
                shown["thinking"] = self.reasoning
        if self.tool_calls:
            shown["tool_calls"] = [
                {"type": "function", "id": f"functions.{call.name}:{index}", "function": call.function(text_arguments)}
                for index, call in enumerate(self.tool_calls)
            ]
        return shown
