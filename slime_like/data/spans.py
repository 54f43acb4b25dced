"""Assistant spans of a conversation: the tokens that carry loss.

The chat template renders every turn as the model will sample it: the generation prompt of the messages in front of it,
then the turn while it is the last message. The tokenizer's offsets map these characters to tokens.
"""

import re
from bisect import bisect_left
from collections.abc import Sequence
from typing import Any

from slime_like.data.chat_template import ChatTemplate, SpanFault, Tools, require_calls, require_tools
from slime_like.data.messages import THINKING_KEY, THINKING_KEYS, Message, Messages, is_trained
from slime_like.models.tokenization import ASKED, SAID, special_token_pattern

Range = tuple[int, int]

_THINKING = re.compile(r"\s*<think>(.*?)</think>", re.DOTALL)
_OPENED = re.compile(r"<think>\s*(</think>\s*)?\Z")


class ConversationEncoder:
    """Finds the assistant spans of conversations. The arguments are those of ``ChatTemplate``.

    Raises ``SpanFault`` if there is no chat template or stop token, or the tokenizer gives no offsets.
    """

    def __init__(self, tokenizer: Any, stop_token_ids: Sequence[int] = ()) -> None:
        self._template = ChatTemplate(tokenizer, stop_token_ids)
        self._backend = _untrimmed(tokenizer)
        self._special = special_token_pattern(tokenizer)

    def encode(self, messages: Messages, tools: Tools = None) -> list[tuple[list[int], list[Range]]]:
        """Render and encode a conversation up to its last trained turn.

        A row continues with the next turn if the template leaves the text so far as it is. Otherwise a new row begins,
        with the earlier turns as the template then shows them.

        Returns rows: tokens, and ``[start, end)`` of the turns that carry loss, in order. Every trained turn carries
        loss in one row. Raises ``SpanFault`` if the template rejects it, or a span cannot be found exactly.
        """
        messages = [self._template.as_read(message) for message in messages]
        trained = [index for index, message in enumerate(messages) if is_trained(message)]
        rows: list[tuple[str, list[Range]]] = []
        for index in trained:
            text, start = self._turn(messages, index, tools)
            spans = rows.pop()[1] if rows and text.startswith(rows[-1][0]) else []
            rows.append((text, [*spans, (start, len(text))]))
        require_tools(self._template, messages[: trained[-1] + 1], tools)
        encoded = []
        for text, turns in rows:
            encoding = self._backend.encode(text, add_special_tokens=False)
            starts = [start for start, _ in encoding.offsets]
            encoded.append((encoding.ids, [_token_span(turn, encoding.offsets, starts) for turn in turns]))
            if encoded[-1][1][0][0] == 0:
                problem = "the conversation starts with the assistant's turn, without any prompt token"
                raise SpanFault("no-prompt", problem)
        return encoded

    def _turn(self, messages: Messages, index: int, tools: Tools) -> tuple[str, int]:
        """Return the text up to the end of a turn, and the index of its first character."""
        before, message = messages[:index], messages[index]
        prompt = self._template.render(before, tools, prompt=True)
        whole = self._template.render([*before, message], tools)
        _require_no_header(self._template, prompt, whole, message, before, tools)
        opened = _OPENED.search(prompt)
        text = whole if whole.startswith(prompt) else _with_thinking(prompt, opened, whole, message, index + 1)
        start = len(prompt)
        _require_rendered(text[opened.start() if opened else start :], message, index + 1)
        require_calls(self._template, whole, messages[: index + 1], tools, index)
        marked = self._template.marked([*before, message], tools) if text is whole else None
        following = messages[index + 1 : index + 2] or [ASKED]
        text = self._ended(text, start, following, "tool_calls" in message)
        if marked is not None and not marked.issuperset(range(start, min(len(text), len(whole)))):
            problem = f"the template's generation markers leave out part of message {index + 1}"
            raise SpanFault("marks-differ", problem)
        return text, start

    def _ended(self, text: str, start: int, following: Messages, called: bool) -> str:
        """Return the text up to and including the stop token that ends the turn that begins at ``start``."""
        encoding = self._backend.encode(text[start:], add_special_tokens=False)
        for token, (_, end) in zip(encoding.ids, encoding.offsets, strict=True):
            if token in self._template.stops:
                rest = text[start + end :]
                if self._special.sub("", rest).strip():
                    problem = f"a turn of the assistant continues after a stop token ({rest!r:.60})"
                    raise SpanFault("text-after-end", problem)
                return text[: start + end]
        return text + self._template.header(following, called)


def _untrimmed(tokenizer: Any) -> Any:
    """Copy the tokenizer's backend without post-processing, which may trim white space off the offsets. That would hide
    tokens that straddle a border. Ids are the same."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        problem = "the tokenizer gives no character offsets"
        raise SpanFault("no-offsets", problem, "give model.path a tokenizer.json, from which a fast one is loaded")
    bare = type(backend).from_str(backend.to_str())
    bare.post_processor = None
    bare.no_truncation()
    bare.no_padding()
    return bare


def _with_thinking(prompt: str, opened: re.Match[str] | None, whole: str, message: Message, number: int) -> str:
    """Return the prompt and a turn that the template writes without the thinking block that its prompt begins."""
    shown = prompt[: opened.start()] if opened else prompt
    turn = whole[len(shown) :]
    block = _THINKING.match(turn)
    if opened is None or not whole.startswith(shown) or (opened[1] and block and block[1].strip()):
        problem = f"the prompt of message {number} (it ends with {prompt[-40:]!r}) is not how its rendering begins"
        raise SpanFault("generation-prompt", problem)
    if opened[1]:  # the prompt closes the block, too
        return prompt + turn[block.end() if block else 0 :]
    if block:  # only white space differs
        return prompt + turn[block.start(1) :].lstrip()
    written = _THINKING.match(message["content"])
    thinking = message.get(THINKING_KEY) or (written[1].strip() if written else "")
    closing = "" if turn.lstrip().startswith("</think>") else "\n</think>\n\n"
    return f"{prompt}{thinking}{closing}{turn}"


def _require_no_header(
    template: ChatTemplate, prompt: str, whole: str, message: Message, before: Messages, tools: Tools
) -> None:
    """Reject templates that ignore ``add_generation_prompt`` and write a header, which would carry loss."""
    begins = whole[len(prompt) :].lstrip().startswith(message["content"].strip() or "\0")
    if begins or template.render(before, tools) != prompt:
        return
    plain = template.render([*before, {"role": "assistant", "content": SAID}], tools)
    if not plain[len(prompt) :].lstrip().startswith(SAID):
        problem = "the template has no generation prompt, so headers of the assistant's turns would carry loss"
        raise SpanFault("no-generation-prompt", problem)


def _require_rendered(turn: str, message: Message, number: int) -> None:
    """Reject templates that leave out part of a turn. The model would learn another one."""
    rendered = "".join(turn.split())
    for key in ("content", *THINKING_KEYS):
        part = message.get(key) or ""
        if "".join(part.split()) not in rendered:
            problem = f"the template leaves out part of message {number}'s {key} ({part.strip()!r:.60})"
            raise SpanFault("message-dropped", problem)


def _token_span(span: Range, offsets: Sequence[Range], starts: Sequence[int]) -> Range:
    first, last = (bisect_left(starts, border) for border in span)
    for border, index in zip(span, (first, last), strict=True):
        straddles = index > 0 and offsets[index - 1][1] > border
        empty = index < len(offsets) and offsets[index] == (border, border)
        if straddles or empty:
            raise SpanFault("split-token", "one token holds text on both sides of a turn's border")
    return first, last
