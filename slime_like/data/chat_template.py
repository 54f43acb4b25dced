"""A tokenizer's chat template: how it renders prompts and turns, and what it leaves out."""

import copy
import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from typing import Any

from slime_like.data.messages import THINKING_KEY, THINKING_KEYS, Message, Messages
from slime_like.models.tokenization import (
    ASKED,
    SAID,
    TemplateFault,
    decode_exactly,
    last_turn_end,
    render_messages,
    special_token_pattern,
    text_after_turn,
)

Tools = Sequence[Mapping[str, Any]] | None

_MARKS = re.compile(r"\{%-?\s*(?:end)?generation\s*-?%\}")
_TEMPLATE = "give model.path a chat template that renders history as it was sampled"
_SHOWS = "give model.path a chat template that shows tools, or remove them from the rows"
_CALLS = [
    [{"type": "function", "id": "abcdefghi", "function": {"name": "f", "arguments": arguments}}]
    for arguments in ({"a": 1}, '{"a": 1}')
]


class SpanFault(Exception):
    """Reason why the spans of a conversation cannot be found exactly. ``code`` is stable."""

    def __init__(self, code: str, problem: str, remedy: str = _TEMPLATE) -> None:
        super().__init__(problem)
        self.code, self.problem, self.remedy = code, problem, remedy


class ChatTemplate:
    """A tokenizer's chat template. ``stop_token_ids`` end a response; by default, the EOS token does."""

    def __init__(self, tokenizer: Any, stop_token_ids: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._stop_token_ids = stop_token_ids

    @cached_property
    def stops(self) -> dict[int, str]:
        """Tokens that end a response, with their texts. Raises ``SpanFault`` if there are none."""
        ids = sorted(set(self._stop_token_ids)) or [self._tokenizer.eos_token_id]
        if ids == [None]:
            raise SpanFault("no-eos", "the tokenizer has no EOS token to end a turn with", "set eos_token in its files")
        return {token: decode_exactly(self._tokenizer, [token]) for token in ids}

    @cached_property
    def end(self) -> str:
        """Text that the template writes after an answer, up to the stop token. Raises ``SpanFault`` without one."""
        text = last_turn_end(self.render)
        found = [text.index(stop) + len(stop) for stop in self.stops.values() if stop and stop in text]
        return text[: min(found)] if found else self.header([ASKED])

    def header(self, following: Messages, called: bool = False) -> str:
        """Return the stop token that starts the next message's header, for templates that write no end of turn."""
        end, header = "", ""
        with suppress(SpanFault):
            alone, special = last_turn_end(self.render, called), special_token_pattern(self._tokenizer)
            _, end, header = text_after_turn(self.render, following, special, alone, called)
        stop = next((stop for stop in self.stops.values() if stop and header.startswith(stop) and not end), None)
        if stop is None:
            names = ", ".join(repr(text or token) for token, text in self.stops.items())
            problem = f"a turn of the assistant does not end with a stop token of the model ({names})"
            remedy = "set rollout.stop_token_ids to the token that ends turns, or give model.path another chat template"
            raise SpanFault("no-end-of-turn", problem, remedy)
        return stop

    def render(self, messages: Messages, tools: Tools = None, prompt: bool = False) -> str:
        """Render messages, with the generation prompt if ``prompt``. Raises ``SpanFault`` on rejection."""
        if self._tokenizer.chat_template is None:
            remedy = "set data.apply_chat_template: false, or give it one"
            raise SpanFault("no-chat-template", "the tokenizer has no chat template", remedy)
        try:
            return render_messages(self._tokenizer, messages, tools, prompt)
        except TemplateFault as fault:
            first = "the first message" if len(messages) == 1 else f"the first {len(messages)} messages"
            what = first if messages else "an assistant's turn without a prompt"
            raise SpanFault(
                "template-failed", f"the chat template rejects {what} ({fault.said})", fault.remedy
            ) from fault

    def prompt(self, messages: Messages, tools: Tools = None) -> str:
        """Render a prompt. Raises ``SpanFault`` if the template rejects it or never shows a part of it.

        Thinking may be left out of earlier turns. That is how many models see their history.
        """
        messages = list(map(self.as_read, messages))
        text = self.render(messages, tools, prompt=True)
        for at, message in enumerate(messages):
            if message["role"] == "assistant" and message.get(THINKING_KEY) and self._thinking_key is None:
                raise SpanFault("message-dropped", f"the template leaves out the thinking of message {at + 1}")
            if message.get("tool_calls") or message.get("function_call"):
                require_calls(self, self.render(messages, tools), messages, tools, at)
        require_tools(self, messages, tools)
        return text

    def marked(self, messages: Messages, tools: Tools = None) -> set[int] | None:
        """Return the characters between ``{% generation %}`` markers; ``None`` without any."""
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
        return {place for start, end in marked for place in range(start, end)}

    def unread(self, variables: Collection[str]) -> list[str]:
        """Return the variables that no chat template of the tokenizer reads."""
        from jinja2 import Environment, TemplateSyntaxError, meta

        template, read = self._tokenizer.chat_template or "", set[str]()
        for text in [template] if isinstance(template, str) else template.values():
            with suppress(TemplateSyntaxError):  # rendering reports it
                parsed = Environment(extensions=["jinja2.ext.loopcontrols"]).parse(_MARKS.sub("", text))
                read |= meta.find_undeclared_variables(parsed)
        return sorted(set(variables) - read)

    def as_read(self, message: Message) -> Message:
        """Return a message with its thinking and the arguments of its calls in the form that the template reads."""
        given, wanted = next(filter(message.get, THINKING_KEYS), None), self._thinking_key or THINKING_KEY
        if given is not None and given != wanted:
            message = {wanted if key == given else key: value for key, value in message.items()}
        if message.get("tool_calls") and self._takes_json:
            calls = copy.deepcopy(message["tool_calls"])
            for function in (call["function"] for call in calls):
                function["arguments"] = json.dumps(function["arguments"], ensure_ascii=False)
            message = {**message, "tool_calls": calls}
        return message

    @cached_property
    def _thinking_key(self) -> str | None:
        """Key under which the template reads thinking, or ``None`` if it reads none."""
        turns = ({"content": "so"}, {"content": "", "tool_calls": _CALLS[0]})
        shown = (key for key in THINKING_KEYS for turn in turns if SAID in self._probe({**turn, key: SAID}))
        return next(shown, None)

    @cached_property
    def _takes_json(self) -> bool:
        """True if the template accepts the arguments of a call only as JSON text."""
        mapping, text = (self._probe({"content": "", "tool_calls": calls}) for calls in _CALLS)
        return bool(text and not mapping)

    def _probe(self, turn: Message) -> str:
        """Render an assistant's turn. Return no text if the template rejects it."""
        with suppress(SpanFault):
            return self.render([ASKED, {"role": "assistant", **turn}])
        return ""


def require_calls(template: ChatTemplate, text: str, messages: Messages, tools: Tools, at: int) -> None:
    """Reject templates that leave out part of the calls of message ``at``."""
    for what, other in _without_calls(messages[at]):
        if _is_rendered_as(template, text, [*messages[:at], other, *messages[at + 1 :]], tools):
            raise SpanFault("message-dropped", f"the template leaves out {what} of message {at + 1}")


def require_tools(template: ChatTemplate, messages: Messages, tools: Tools) -> None:
    """Reject templates that leave out tools or what they answer. The model would answer what it never saw."""
    others = [each | {"content": each["content"] + "-"} if each["role"] == "tool" else each for each in messages]
    if not tools and others == messages:
        return
    text = template.render(messages, tools)
    if tools and _is_rendered_as(template, text, messages, None):
        raise SpanFault("tools-not-rendered", "the template does not render `tools`", _SHOWS)
    if others != messages and _is_rendered_as(template, text, others, tools):
        raise SpanFault("tools-not-rendered", "the template does not render messages of tools", _SHOWS)


def _without_calls(message: Message) -> Iterator[tuple[str, Message]]:
    """Yield messages that lack one part of a tool call: (missing part, message). Names and arguments may occur
    elsewhere in the text, so a search proves nothing."""
    calls = message.get("tool_calls", [])
    for place, call in enumerate(calls):
        function = call["function"]
        arguments = function.get("arguments")
        changes: list[tuple[str, dict[str, Any]]] = [("the name", {"name": f"{function['name']}_"})]
        changes += [("the arguments", {"arguments": type(arguments)()})] if arguments not in (None, {}, "{}") else []
        for what, changed in changes:
            other = [*calls[:place], {**call, "function": {**function, **changed}}, *calls[place + 1 :]]
            yield f"{what} of the call of {function['name']!r}", {**message, "tool_calls": other}
    if message.get("function_call"):
        yield "`function_call`", {key: value for key, value in message.items() if key != "function_call"}


def _is_rendered_as(template: ChatTemplate, text: str, messages: Messages, tools: Tools) -> bool:
    try:
        return template.render(messages, tools) == text
    except SpanFault:
        return False
