"""Messages as text and token ids, by the chat template."""

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from slime_like.agents.messages import Message, Tool
from slime_like.models.special_tokens import special_token_pattern

_CUT = "\ufdd0"
"""Where text is cut before it is encoded. Unicode reserves this number: no text has it."""

_NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}}

_CONTEXT_TOKENS = 16
"""Tokens before a continuation that decide how it is decoded: a space at its front, a character cut in two."""


class TemplateFault(ValueError):
    """The chat template rejects the messages; the text is what it reported."""


class Rendering:
    """Text of a prompt, cut where a client's text spells a special token: encoded apart, it becomes none."""

    def __init__(self, pieces: Sequence[str]) -> None:
        self.pieces = tuple(pieces)
        self.text = "".join(pieces)

    def after(self, prefix: str) -> "Rendering | None":
        """What follows ``prefix``; ``None`` where the text does not begin with it."""
        if not self.text.startswith(prefix):
            return None
        rest, left = [], len(prefix)
        for piece in self.pieces:
            rest.append(piece[left:])
            left = max(0, left - len(piece))
        return Rendering(rest)


class ChatFormat:
    """A tokenizer and its chat template."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._special = special_token_pattern(tokenizer)

    def render(self, messages: Sequence[Message], tools: Sequence[Tool]) -> Rendering:
        """Text that ends where the model's next turn begins. Raises ``TemplateFault``."""
        shown = [m.for_template() if m.is_sampled else self._cut_special(m.for_template()) for m in messages]
        described = [self._cut_special(tool) for tool in tools]
        try:
            text: str = self._tokenizer.apply_chat_template(
                shown, tools=described or None, tokenize=False, add_generation_prompt=True
            )
        except Exception as error:  # templates are programs of the checkpoint and raise what they like
            raise TemplateFault(f"{type(error).__name__}: {error}".replace(_CUT, "")) from error
        return Rendering(text.split(_CUT))

    @cached_property
    def renders_tools(self) -> bool:
        """Whether a prompt differs by the tools that it is given."""
        asked = [Message("user", "a")]
        tool = {"type": "function", "function": {"name": "f", "description": "b", "parameters": _NO_PARAMETERS}}
        try:
            return self.render(asked, [tool]).text != self.render(asked, []).text
        except TemplateFault:  # a call says what is wrong
            return True

    def encode(self, rendering: Rendering) -> list[int]:
        """Token ids of the text, as a sampled turn's are never made."""
        return [
            token
            for piece in rendering.pieces
            if piece
            for token in self._tokenizer.encode(piece, add_special_tokens=False)
        ]

    def extend(self, tokens: Sequence[int], text: str, rendering: Rendering) -> list[int] | None:
        """``tokens``, and the ids of what follows their ``text`` in the rendering.

        ``None`` where the rendering does not begin with that text, or the new ids read differently behind ``tokens``.
        """
        rest = rendering.after(text)
        if rest is None:
            return None
        new = self.encode(rest)
        if self.continuation(tokens, new) != self._decode(new):
            return None
        return [*tokens, *new]

    def continuation(self, before: Sequence[int], tokens: Sequence[int], visible: bool = False) -> str:
        """Text that ``tokens`` add behind ``before``; with ``visible``, without special tokens."""
        context = list(before[-_CONTEXT_TOKENS:])
        start, whole = self._decode(context, visible), self._decode([*context, *tokens], visible)
        return whole.removeprefix(start) if whole.startswith(start) else self._decode(tokens, visible)

    def _decode(self, tokens: Sequence[int], visible: bool = False) -> str:
        text: str = self._tokenizer.decode(
            list(tokens), skip_special_tokens=visible, clean_up_tokenization_spaces=False
        )
        return text

    def _cut_special(self, value: Any) -> Any:
        """``value`` with a cut behind the first character of every special token in its texts."""
        if isinstance(value, str):
            whole = value.encode("utf-8", "replace").decode().replace(_CUT, "\ufffd")
            return self._special.sub(lambda found: found[0][:1] + _CUT + found[0][1:], whole)
        if isinstance(value, Mapping):
            return {self._cut_special(key): self._cut_special(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self._cut_special(item) for item in value]
        return value
