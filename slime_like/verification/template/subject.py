"""What is tried on a chat template, and what was found."""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from slime_like.data.messages import Messages
from slime_like.data.spans import ConversationEncoder, SpanFault
from slime_like.verification.template.histories import History

SUPERVISED, AGENTS = "supervised", "agents"
"""What a property is needed for: rows of ``data.messages_key``; conversations that go on from sampled tokens."""


class Subject:
    """The template under test, and the encoder that rows go through. Renderings are kept: most serve several times."""

    def __init__(self, tokenizer: Any, encoder: ConversationEncoder) -> None:
        self.tokenizer, self.encoder, self.template = tokenizer, encoder, encoder.template
        self._rendered: dict[tuple[str, bool], str | SpanFault] = {}

    def render(self, messages: Messages, history: History, prompt: bool = False) -> str:
        """Render messages of a history with its tools. Raises ``SpanFault``: the template rejects them."""
        key = (json.dumps([messages, history.tools]), prompt)
        if key not in self._rendered:
            try:
                self._rendered[key] = self.template.render(messages, history.tools, prompt)
            except SpanFault as fault:
                self._rendered[key] = fault
        rendered = self._rendered[key]
        if isinstance(rendered, SpanFault):
            raise rendered
        return rendered

    def whole(self, history: History) -> str:
        return self.render(history.messages, history)


Find = Callable[[Subject, History], Iterator[str]]
"""Yields "" for each place of a history where a property was tried and holds, and a sentence where it fails."""


@dataclass(frozen=True, slots=True)
class Property:
    """A property.

    Attributes:
        code: stable name.
        statement: what holds.
        needed: what it is needed for; empty: good to know.
        histories: keyword arguments of the ``HistoryGenerator``.
    """

    code: str
    statement: str
    needed: tuple[str, ...]
    find: Find
    histories: Mapping[str, bool]


@dataclass(frozen=True, slots=True)
class Verdict:
    """What was found about one property.

    Attributes:
        tried: places where it was tried; 0: the template takes no history that could show it.
        problem: one sentence about ``example``, the smallest history at which it fails.
    """

    tested: Property
    tried: int
    problem: str = ""
    example: History | None = None

    @property
    def holds(self) -> bool:
        return not self.problem

    @property
    def is_fatal(self) -> bool:
        return bool(self.problem and self.tested.needed)
