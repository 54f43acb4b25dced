"""Assistant spans of a conversation: the tokens that carry loss.

The chat template renders the conversation once, and the text is encoded once. Renderings of prefixes show where each
assistant turn begins (after the generation prompt) and ends (at its end-of-turn token). The tokenizer's offsets map
these characters to tokens.
"""

import re
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from slime_like.data.messages import Message, Messages
from slime_like.data.tokenizer import template_fault, token_names

Tools = Sequence[Mapping[str, Any]] | None
Range = tuple[int, int]

_MARKS = re.compile(r"\{%-?\s*generation\s*-?%\}")
_THINKING = re.compile(r"<think>.*?</think>", re.DOTALL)
_TEMPLATE = "give model.path a chat template that renders history as it was sampled"


class SpanFault(Exception):
    """Reason why the spans of a conversation cannot be found exactly. ``code`` is stable."""

    def __init__(self, code: str, problem: str, remedy: str = _TEMPLATE) -> None:
        super().__init__(problem)
        self.code, self.problem, self.remedy = code, problem, remedy


class _ChatTemplate:
    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def render(self, messages: Messages, tools: Tools = None, prompt: bool = False) -> str:
        """Render messages, with the generation prompt if ``prompt``. Raises ``SpanFault`` on rejection."""
        try:
            text: str = self._tokenizer.apply_chat_template(
                messages, tools=tools, tokenize=False, add_generation_prompt=prompt
            )
        except Exception as error:  # templates are programs of the checkpoint and can raise anything
            said, remedy = template_fault(error)
            first = "the first message" if len(messages) == 1 else f"the first {len(messages)} messages"
            what = first if messages else "an assistant's turn without a prompt"
            raise SpanFault("template-failed", f"the chat template rejects {what} ({said})", remedy) from error
        return text

    def marks(self, messages: Messages, tools: Tools = None) -> list[Range] | None:
        """Return the characters between ``{% generation %}`` markers, adjacent ranges joined; ``None`` without any."""
        from transformers.utils.chat_template_utils import render_jinja_template

        template = self._tokenizer.get_chat_template(None, tools)
        if not _MARKS.search(template):
            return None
        _, [marked] = render_jinja_template(
            conversations=[messages],
            tools=tools,
            chat_template=template,
            return_assistant_tokens_mask=True,
            **self._tokenizer.special_tokens_map,
            **getattr(self._tokenizer, "template_variables", {}),
        )
        joined: list[Range] = []
        for start, end in marked:
            if joined and joined[-1][1] == start:
                joined[-1] = (joined[-1][0], end)
            elif end > start:
                joined.append((start, end))
        return joined


class ConversationEncoder:
    """Finds the assistant spans of conversations.

    Args:
        tokenizer: Hugging Face tokenizer with a chat template.
        stop_token_ids: tokens at which engines end a response; by default, the tokenizer's EOS token.

    Raises:
        SpanFault: there is no chat template or stop token, or the tokenizer gives no offsets.
    """

    def __init__(self, tokenizer: Any, stop_token_ids: Sequence[int] = ()) -> None:
        self._template = _ChatTemplate(tokenizer)
        if tokenizer.chat_template is None:
            raise SpanFault("no-chat-template", "the tokenizer has no chat template", "give it one")
        eos = tokenizer.eos_token_id
        self._stops = frozenset(stop_token_ids) or frozenset(() if eos is None else (eos,))
        if not self._stops:
            raise SpanFault("no-eos", "the tokenizer has no EOS token to end a turn with", "set eos_token in its files")
        self._stop_names = token_names(tokenizer, self._stops)
        self._backend = _untrimmed(tokenizer)

    def encode(self, messages: Messages, tools: Tools = None) -> tuple[list[int], list[Range]]:
        """Render and encode a conversation.

        Returns:
            Its tokens, and ``[start, end)`` of the parts that carry loss, in order, one per assistant turn.

        Raises:
            SpanFault: the template rejects it, or a span cannot be found exactly.
        """
        text = self._template.render(messages, tools)
        turns = _find_turns(self._template, text, messages, tools)
        _require_rendered(self._template, text, turns, messages, tools)
        encoding = self._backend.encode(text, add_special_tokens=False)
        tokens, offsets = encoding.ids, encoding.offsets
        starts = [start for start, _ in offsets]
        ends = [self._end_of_turn(text, turn, tokens, offsets, starts) for turn in turns]
        characters = [(start, end) for (start, _), end in zip(turns, ends, strict=True)]
        marks = self._template.marks(messages, tools)
        if marks is not None:
            _require_agreement(marks, characters, turns)
            characters = marks
        spans = [_token_span(span, offsets, starts) for span in characters]
        if spans[0][0] == 0:
            raise SpanFault("no-prompt", "the conversation starts with the assistant's turn, without any prompt token")
        return tokens, spans

    def _end_of_turn(
        self, text: str, turn: Range, tokens: Sequence[int], offsets: Sequence[Range], starts: Sequence[int]
    ) -> int:
        """Return the index of the character after the stop token that ends a turn."""
        for index in range(bisect_left(starts, turn[0]), bisect_left(starts, turn[1])):
            if tokens[index] not in self._stops:
                continue
            end = offsets[index][1]
            if text[end : turn[1]].strip():
                problem = f"a turn of the assistant continues after a stop token ({text[end : turn[1]]!r:.60})"
                raise SpanFault("text-after-end", problem)
            return end
        raise SpanFault(
            "no-end-of-turn",
            f"a turn of the assistant does not end with a stop token of the model ({self._stop_names})",
            "set rollout.stop_token_ids to the token that ends turns, or give model.path another chat template",
        )


def _untrimmed(tokenizer: Any) -> Any:
    """Copy the tokenizer's backend without post-processing, which may trim white space off the offsets. That would hide
    tokens that straddle a border. Ids are the same."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        problem = "the tokenizer gives no character offsets"
        raise SpanFault("no-offsets", problem, "give model.path a tokenizer.json, from which a fast one is loaded")
    copy = type(backend).from_str(backend.to_str())
    copy.post_processor = None
    copy.no_truncation()
    copy.no_padding()
    return copy


def _find_turns(template: _ChatTemplate, text: str, messages: Messages, tools: Tools) -> list[Range]:
    """Return the characters of each assistant turn, from the end of the generation prompt to the start of the next
    message.

    Args:
        text: the whole conversation, rendered.

    Raises:
        SpanFault: the text of a prefix is not the beginning of ``text``.
    """
    turns = []
    for index, message in enumerate(messages):
        if not _is_assistant(message):
            continue
        start = _turn_start(template, text, messages[:index], message, tools)
        rendered = text if index + 1 == len(messages) else template.render(messages[: index + 1], tools)
        if not text.startswith(rendered):
            raise _changed_turn(index + 1, message, rendered[start:], text[start:])
        turns.append((start, len(rendered)))
    return turns


def _turn_start(template: _ChatTemplate, text: str, before: Messages, message: Message, tools: Tools) -> int:
    prompt, number = template.render(before, tools, prompt=True), len(before) + 1
    if text.startswith(prompt):
        begins = text[len(prompt) :].lstrip().startswith(message["content"].strip() or "\0")
        if not begins and template.render(before, tools) == prompt:
            problem = "the template has no generation prompt, so headers of the assistant's turns would carry loss"
            raise SpanFault("no-generation-prompt", problem)
        return len(prompt)
    plain = template.render(before, tools)
    if text.startswith(plain):
        problem = f"the generation prompt ({prompt[len(plain) :]!r:.60}) is not how message {number} begins in history"
        raise SpanFault("generation-prompt", problem)
    what = f"the first {len(before)} messages are" if len(before) > 1 else "the first message is"
    raise SpanFault("prefix-changed", f"{what} rendered differently when others follow")


def _changed_turn(number: int, message: Message, alone: str, followed: str) -> SpanFault:
    """Build the fault of a changed turn. ``alone`` and ``followed`` start after the generation prompt."""
    block = _THINKING.search(alone)
    thinking = block[0] if block else message.get("reasoning_content", "").strip()
    if thinking and thinking not in followed[: len(alone)]:
        problem = f"the template drops the thinking of message {number} when other messages follow"
        return SpanFault("thinking-dropped", problem)
    return SpanFault("turn-changed", f"message {number} is rendered differently when other messages follow")


def _require_rendered(
    template: _ChatTemplate, text: str, turns: Sequence[Range], messages: Messages, tools: Tools
) -> None:
    """Reject templates that leave something out. The model would learn other turns, or answers to what it never saw."""
    assistant = [(number, message) for number, message in enumerate(messages, start=1) if _is_assistant(message)]
    behind = 0  # text that a generation prompt anticipates, such as "<think>", is in front of the turn
    for (_, end), (number, message) in zip(turns, assistant, strict=True):
        rendered = _squeezed(text[behind:end])
        for part in (message["content"], message.get("reasoning_content", "")):
            if _squeezed(part) not in rendered:
                problem = f"the template leaves out part of message {number} ({part.strip()!r:.60})"
                raise SpanFault("message-dropped", problem)
        behind = end
    for number, what, others in _without_calls(messages):
        if _is_rendered_as(template, text, others, tools):
            raise SpanFault("message-dropped", f"the template leaves out {what} of message {number}")
    if tools and _is_rendered_as(template, text, messages, None):
        raise SpanFault("tools-not-rendered", "the template does not render `tools`")
    others = [each | {"content": each["content"] + "-"} if each["role"] == "tool" else each for each in messages]
    if others != messages and _is_rendered_as(template, text, others, tools):
        raise SpanFault("tools-not-rendered", "the template does not render messages of tools")


def _without_calls(messages: Messages) -> Iterator[tuple[int, str, Messages]]:
    """Yield conversations that lack one part of a tool call: (message number, missing part, messages). Names and
    arguments may occur elsewhere in the text, so a search proves nothing."""
    for index, message in enumerate(messages):
        calls = message.get("tool_calls", [])
        for place, call in enumerate(calls):
            function = call["function"]
            changes: list[tuple[str, dict[str, Any]]] = [("the name", {"name": f"{function['name']}_"})]
            changes += [("the arguments", {"arguments": {}})] if function.get("arguments") else []
            for what, changed in changes:
                other = [*calls[:place], {**call, "function": {**function, **changed}}, *calls[place + 1 :]]
                whole = [*messages[:index], {**message, "tool_calls": other}, *messages[index + 1 :]]
                yield index + 1, f"{what} of the call of {function['name']!r}", whole
        if _is_assistant(message) and message.get("function_call"):
            bare = {key: value for key, value in message.items() if key != "function_call"}
            yield index + 1, "`function_call`", [*messages[:index], bare, *messages[index + 1 :]]


def _is_rendered_as(template: _ChatTemplate, text: str, messages: Messages, tools: Tools) -> bool:
    try:
        return template.render(messages, tools) == text
    except SpanFault:
        return False


def _is_assistant(message: Message) -> bool:
    return bool(message["role"] == "assistant")


def _squeezed(text: str) -> str:
    return "".join(text.split())


def _require_agreement(marks: Sequence[Range], found: Sequence[Range], turns: Sequence[Range]) -> None:
    """Reject ``{% generation %}`` markers that start elsewhere than the turn or end before its stop token."""
    agree = len(marks) == len(found) and all(
        mark[0] == span[0] and span[1] <= mark[1] <= turn[1]
        for mark, span, turn in zip(marks, found, turns, strict=True)
    )
    if not agree:
        problem = f"the template's generation markers ({list(marks)!r:.60}) are not the turns ({list(found)!r:.60})"
        raise SpanFault("marks-differ", problem)


def _token_span(span: Range, offsets: Sequence[Range], starts: Sequence[int]) -> Range:
    first, last = (bisect_left(starts, border) for border in span)
    for border, index in zip(span, (first, last), strict=True):
        straddles = index > 0 and offsets[index - 1][1] > border
        empty = index < len(offsets) and offsets[index] == (border, border)
        if straddles or empty:
            raise SpanFault("split-token", "one token holds text on both sides of a turn's border")
    return first, last
