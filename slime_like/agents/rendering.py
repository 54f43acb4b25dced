"""Chat messages in a form that all protocols share, and their rendering to text and token ids."""

import json
import re
import sys
from collections.abc import Collection, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from functools import cached_property, partial
from hashlib import blake2b
from typing import Any

from slime_like.models.tokenization import (
    CUT,
    TemplateFault,
    cut_special,
    decode_exactly,
    encode_pieces,
    render_messages,
    special_token_pattern,
    with_template_variables,
    without_stop,
)

Tool = Mapping[str, Any]
"""A tool's description in the form that chat templates accept: ``{"type": "function", "function": {"name": ...}}``."""

TEXT = "input"
"""Parameter under which the model writes the text of a custom tool."""

_NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}}

_CONTEXT_TOKENS = 16
"""Tokens in front of a continuation that affect its decoding, such as a leading space or a split character."""


@dataclass(frozen=True)
class ToolCall:
    """A tool call. ``arguments`` is the client's text if it is not a mapping, and ``id`` is the client's, if any."""

    name: str
    arguments: Mapping[str, Any] | str
    id: str = field(default="", compare=False)

    def to_arguments(self, text_tools: Collection[str]) -> dict[str, str]:
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


class Rendering:
    """Text of a prompt in pieces. Cuts split special tokens that a client spells, so they encode as plain text."""

    def __init__(self, pieces: Sequence[str]) -> None:
        self.pieces = tuple(pieces)
        self.text = "".join(pieces)

    def after(self, prefix: str) -> "Rendering | None":
        """Return the text after ``prefix``, or ``None`` if the text does not start with it."""
        if not self.text.startswith(prefix):
            return None
        rest, left = [], len(prefix)
        for piece in self.pieces:
            rest.append(piece[left:])
            left = max(0, left - len(piece))
        return Rendering(rest)


class ChatFormat:
    """A tokenizer with its chat template. ``text_arguments``: it expects the arguments of calls as JSON text."""

    def __init__(self, tokenizer: Any, text_arguments: bool = False) -> None:
        self._tokenizer = tokenizer
        self._text_arguments = text_arguments
        self._max_tokens = sys.maxsize
        self._special = special_token_pattern(tokenizer)
        self._decode = partial(decode_exactly, tokenizer)

    def with_variables(self, variables: Mapping[str, Any]) -> "ChatFormat":
        other = copy(self)
        other._tokenizer = with_template_variables(self._tokenizer, cut_special(variables, self._special))
        return other

    def with_limit(self, tokens: int) -> "ChatFormat":
        """Return a copy whose ``encode`` raises ``TooManyTokens`` for a text of more than twice as many tokens."""
        other = copy(self)
        other._max_tokens = tokens
        return other

    def render(self, messages: Sequence[Message], tools: Sequence[Tool], next_turn: bool = True) -> Rendering:
        """Render messages up to where the model's next turn begins, or to their end. Raises ``TemplateFault``."""
        special = self._special
        given = ((m, m.for_template(self._text_arguments)) for m in messages)
        shown = [one if m.is_sampled else cut_special(one, special) for m, one in given]
        return Rendering(render_messages(self._tokenizer, shown, cut_special(tools, special), next_turn).split(CUT))

    @cached_property
    def renders_tools(self) -> bool:
        """True if the template includes the given tools in the prompt."""
        asked = [Message("user", "a")]
        tool = {"type": "function", "function": {"name": "f", "description": "b", "parameters": _NO_PARAMETERS}}
        try:
            return self.render(asked, [tool]).text != self.render(asked, []).text
        except TemplateFault:  # a call reports the problem
            return True

    def encode(self, rendering: Rendering) -> list[int]:
        """Encode the text. Sampled turns are never encoded like this."""
        return encode_pieces(self._tokenizer, rendering.pieces, self._max_tokens)

    def extend(self, tokens: Sequence[int], text: str, rendering: Rendering) -> list[int] | None:
        """Return ``tokens`` extended with the ids of the text that follows ``text`` in the rendering.

        Returns ``None`` if the rendering does not start with ``text``, or the new ids decode differently there.
        """
        rest = rendering.after(text)
        if rest is None:
            return None
        new = self.encode(rest)
        if self.continuation(tokens, new) != self._decode(new):
            return None
        return [*tokens, *new]

    def after_turn(
        self, messages: Sequence[Message], rendered: str, stop: str, new: Sequence[Message], tools: Sequence[Tool]
    ) -> tuple[Rendering, str] | None:
        """Return what the template writes after a turn that the model wrote in other words, and the whole rendering.

        Returns ``None`` if the template writes the history or the turn differently because of what follows.

        Args:
            messages: the history, and the turn as a message.
            rendered: the turn's prompt as the template wrote it.
            stop: the stop token that ended the turn, or an empty string if it was cut off.
        """
        before, _ = self._without_end(self.render(messages[:-1], tools, next_turn=False))
        written, end = self._without_end(self.render(messages, tools, next_turn=False))
        whole = self.render([*messages, *new], tools)
        if not (rendered.startswith(before) and written.startswith(before) and whole.text.startswith(written)):
            return None
        if messages[-1].reasoning not in whole.text and any(message.role == "user" for message in new):
            return None  # the template drops the thinking of earlier answers
        for mark in dict.fromkeys((end, stop)) if stop else ():
            written += mark if whole.text.startswith(written + mark) else ""
        rest = whole.after(written)
        return None if rest is None else (rest, whole.text)

    def _without_end(self, rendering: Rendering) -> tuple[str, str]:
        """Split off the special token that ends a rendering, or an empty string."""
        end = re.search(rf"(?:{self._special.pattern})?\s*\Z", rendering.text)
        return (rendering.text[: end.start()], end[0].rstrip()) if end is not None else (rendering.text, "")

    def turn_text(self, before: Sequence[int], tokens: Sequence[int], stops: Collection[int] | None = ()) -> str:
        """Decode a turn without the stop token that ended it (``without_stop``)."""
        return self.continuation(before, without_stop(self._tokenizer, tokens, stops))

    def continuation(self, before: Sequence[int], tokens: Sequence[int]) -> str:
        """Decode the text that ``tokens`` add after ``before``."""
        context = list(before[-_CONTEXT_TOKENS:])
        start, whole = self._decode(context), self._decode([*context, *tokens])
        return whole.removeprefix(start) if whole.startswith(start) else self._decode(tokens)
