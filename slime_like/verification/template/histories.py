"""Random message histories for judging chat templates, and the search for a smaller one that still fails."""

import itertools
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from slime_like.data.messages import Message, Messages

TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds two numbers.",
        "parameters": {"type": "object", "properties": {"a": {"type": "number"}, "b": {"type": "number"}}},
    },
}

_WORDS = (
    *("alpha", "beta", "7 * 6 = 42", "end.", 'a "quote"', "two\nlines", "x = {1}"),
    *("na\u00efve", "\u65e5\u672c", "\U0001f600"),
)
_EDGES = (" {}", "{} ", "\n{}", "{}\n", " {}\n\n", "\t{}")
_CALL_ID = "abcdefghi"
"""Nine letters and digits, as some templates require."""


@dataclass(frozen=True, slots=True)
class History:
    """Messages, and the tools that the model is offered."""

    messages: Messages
    tools: list[dict[str, Any]] | None = None

    @property
    def size(self) -> tuple[int, int]:
        return len(self.messages), len(self.text())

    def text(self) -> str:
        """The messages as JSON, and the names of the tools."""
        names = [tool["function"]["name"] for tool in self.tools or ()]
        return json.dumps(self.messages, ensure_ascii=False) + (f" with tools {', '.join(names)}" if names else "")

    def turns(self) -> list[int]:
        """Return the indices of the assistant's messages."""
        return [index for index, message in enumerate(self.messages) if message["role"] == "assistant"]


class HistoryGenerator:
    """Draws histories: a system message or none, then exchanges, some of them with calls of a tool.

    Args:
        tools: some exchanges call tools, up to three at once.
        thinking: answers begin with a block of thinking, in the text or as ``reasoning_content``.
        edges: texts begin or end with white space.
    """

    def __init__(self, seed: int, *, tools: bool = False, thinking: bool = False, edges: bool = False) -> None:
        self._random = random.Random(f"{seed} {tools} {thinking} {edges}")
        self._tools, self._thinking, self._edges = tools, thinking, edges
        self._count = 0

    def draw(self) -> History:
        """The next history, of one to four exchanges; texts of one history all differ."""
        messages: Messages = []
        self._count = 0
        if self._random.random() < 0.5:
            messages.append({"role": "system", "content": self._text()})
        as_key = self._random.random() < 0.5
        for _ in range(self._random.randint(1, 4)):
            messages.append({"role": "user", "content": self._text()})
            if self._tools and self._random.random() < 0.6:
                messages += self._calls(as_key)
            messages.append(self._answer(as_key))
        offered = self._tools and self._random.random() < 0.7
        return History(messages, [TOOL] if offered else None)

    def _text(self) -> str:
        words = " ".join(self._random.choice(_WORDS) for _ in range(self._random.randint(1, 3)))
        self._count += 1
        form = self._random.choice(_EDGES) if self._edges else "{}"
        return form.format(f"{words} #{self._count}#")

    def _answer(self, as_key: bool) -> Message:
        content = self._text()
        if not self._thinking:
            return {"role": "assistant", "content": content}
        thought = self._text()
        if as_key:
            return {"role": "assistant", "reasoning_content": thought, "content": content}
        return {"role": "assistant", "content": f"<think>\n{thought}\n</think>\n\n{content}"}

    def _calls(self, as_key: bool) -> Iterator[Message]:
        number = self._random.randint(1, 3)
        call = {"id": _CALL_ID, "type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": number}}}
        asked = self._answer(as_key) if self._thinking else {"role": "assistant", "content": ""}
        yield {**asked, "tool_calls": [call] * number}
        for _ in range(number):
            yield {"role": "tool", "tool_call_id": _CALL_ID, "name": "add", "content": self._text()}


def shrink(history: History, fails: Callable[[History], bool]) -> History:
    """Return a history that still fails, and of which no single simplification does."""
    while True:
        smaller = next((each for each in _simpler(history) if each.size < history.size and fails(each)), None)
        if smaller is None:
            return history
        history = smaller


def _simpler(history: History) -> Iterator[History]:
    messages, tools = history.messages, history.tools
    if tools:
        yield History(messages, None)
    for length in range(len(messages) - 1, 0, -1):
        for start in range(len(messages) - length + 1):
            rest = messages[:start] + messages[start + length :]
            if _is_sensible(rest):
                yield History(rest, tools)
    for index, message in enumerate(messages):
        for simpler in _simpler_messages(message):
            yield History([*messages[:index], simpler, *messages[index + 1 :]], tools)


def _simpler_messages(message: Message) -> Iterator[Message]:
    for key, (shape, letter) in itertools.product(("content", "reasoning_content"), _SHAPES):
        if message.get(key):
            yield message | {key: shape.format(letter)}
    if len(message.get("tool_calls", ())) > 1:
        yield message | {"tool_calls": message["tool_calls"][:1]}


_SHAPES = tuple(itertools.product(("{}", " {}", "{} ", "\n{}", "{}\n", "<think>\nq\n</think>\n\n{}"), ("x", "y", "z")))


def _is_sensible(messages: Messages) -> bool:
    """A conversation may have it: the user begins, answers of tools follow calls, and one message follows another."""
    roles = [message["role"] for message in messages]
    begins = roles[1:2] == ["user"] if roles[:1] == ["system"] else roles[:1] == ["user"]
    if not begins:
        return False
    for before, after in itertools.pairwise(messages):
        called = "tool_calls" in before or before["role"] == "tool"
        if (after["role"] == "tool") != called and after["role"] != "assistant":
            return False
        if after["role"] == "assistant" and before["role"] not in ("user", "tool"):
            return False
        if after["role"] == "user" and before["role"] not in ("assistant", "system"):
            return False
    return True
