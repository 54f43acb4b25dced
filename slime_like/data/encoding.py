"""Encoding of rows to token ids."""

import json
import math
import re
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

from slime_like.config import DataConfig
from slime_like.data.formats import fitting_format, in_format
from slime_like.data.message_keys import fold_keys
from slime_like.data.messages import read_conversation, role_problem
from slime_like.data.rows import Row
from slime_like.data.spans import ConversationEncoder, SpanFault
from slime_like.data.tokenizer import template_fault
from slime_like.models.special_tokens import special_token_pattern

_SHOWN = 10
"""Limit on the keys named in an error about a row without a prompt."""


@dataclass(frozen=True, slots=True)
class EncodedRow:
    """Token ids of a prompt, with its answer, settings for an environment, and chat messages as JSON if they are kept.
    Ids are machine integers: Python integers for a million prompts would fill the memory.

    Attributes:
        response_tokens: ids of the demonstration, EOS included; ``None`` if the row has none.
        spans: ``[start, end)`` in ``response_tokens`` of the tokens that carry loss; ``None`` means all.
        forks: indices in ``response_tokens`` at which another training row of the conversation begins.
    """

    tokens: Sequence[int]
    answer: str
    response_tokens: Sequence[int] | None
    environment: dict[str, Any] | None
    spans: tuple[tuple[int, int], ...] | None = None
    forks: tuple[int, ...] = ()
    messages: str | None = None

    @property
    def total_len(self) -> int:
        """Number of tokens of the longest training row."""
        borders = pairwise((-len(self.tokens), *self.forks, len(self.response_tokens or ())))
        return max(end - start for start, end in borders)


class RowEncoder:
    """Encodes rows by the keys of ``DataConfig``. Every fault is a ``DataError`` that names file and line.

    Args:
        need_response: whether all rows must have a demonstration: a response, or with ``messages_key`` a conversation.
        stop_token_ids: tokens that may end an assistant turn; by default, the tokenizer's EOS token.
        keep_messages: whether rows keep their chat messages, for agents.
    """

    def __init__(
        self,
        tokenizer: Any,
        config: DataConfig,
        need_response: bool,
        stop_token_ids: Sequence[int] = (),
        keep_messages: bool = False,
    ) -> None:
        self._tokenizer = tokenizer
        self._config = config
        self._need_response = need_response
        self._keep_messages = keep_messages
        self._vocab_size = len(tokenizer)
        self._system = [] if config.system_prompt is None else [{"role": "system", "content": config.system_prompt}]
        self._special = special_token_pattern(tokenizer)
        self._stop_token_ids = stop_token_ids

    def encode(self, row: Row) -> EncodedRow:
        if self._need_response and self._config.messages_key is not None:
            return self._encode_conversation(row, self._config.messages_key)
        row = in_format(row, self._config)
        tokens = self._prompt_tokens(row)
        if not tokens:
            problem = "the prompt has no token"
            raise row.fault("empty-prompt", problem, "a model cannot start from nothing, remove the row")
        answer, response = self._answer(row), self._response_tokens(row)
        messages = self._messages(row) if self._keep_messages else None
        environment = self._environment(row)
        return EncodedRow(array("i", tokens), answer, response and array("i", response), environment, messages=messages)

    def _messages(self, row: Row) -> str | None:
        """Return the messages as JSON, or ``None`` if the row only has token ids."""
        if row.get(self._config.token_ids_key) is not None:
            return None
        return json.dumps(self._as_messages(row, row.get(self._config.prompt_key)))

    def _as_messages(self, row: Row, prompt: Any) -> Any:
        """Return the chat messages of a prompt, with the system prompt in front if one is set."""
        messages, system = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt, self._system
        if not system or not isinstance(messages, list):
            return messages
        if any(isinstance(message, dict) and message.get("role") == "system" for message in messages):
            problem = f"{self._config.prompt_key!r} has a system message, and data.system_prompt is set"
            raise row.fault("two-system-prompts", problem, "remove one")
        return [*system, *messages]

    def _encode_conversation(self, row: Row, key: str) -> EncodedRow:
        messages, tools = read_conversation(row, key)
        self._require_text(row, key, [messages, tools])
        try:
            rows = self._conversations.encode(fold_keys(row, key, messages), tools)
        except SpanFault as fault:
            raise row.fault(fault.code, f"{key!r}: {fault.problem}", fault.remedy) from fault
        first = rows[0][1][0][0]
        prompt, response = array("i", rows[0][0][:first]), array("i")
        spans, starts = list[tuple[int, int]](), list[int]()
        for tokens, found in rows:
            starts.append(len(response) - (0 if starts else first))
            spans += [(starts[-1] + start, starts[-1] + end) for start, end in found]
            response.extend(tokens if starts[1:] else tokens[first:])
        answer, environment = self._answer(row), self._environment(row)
        return EncodedRow(prompt, answer, response, environment, tuple(spans), forks=tuple(starts[1:]))

    @cached_property
    def _conversations(self) -> ConversationEncoder:
        return ConversationEncoder(self._tokenizer, self._stop_token_ids)

    def _environment(self, row: Row) -> dict[str, Any] | None:
        key = self._config.environment_key
        value = None if key is None else row.get(key)
        try:
            if not isinstance(value, dict | None):
                raise TypeError(f"is a {type(value).__name__}")
            json.dumps(value, allow_nan=False)
        except (TypeError, ValueError) as error:
            problem = f"{key!r} must be a mapping that JSON can express ({error})"
            raise row.fault("environment-settings", problem, "correct it, or set data.environment_key") from error
        return value

    def _prompt_tokens(self, row: Row) -> list[int]:
        given = row.get(self._config.token_ids_key)
        if given is not None:
            return row.token_ids(self._config.token_ids_key, given, self._vocab_size, "tokenizer")
        key = self._config.prompt_key
        prompt = row.get(key)
        if prompt is None:
            problem = f"has neither {key!r} nor {self._config.token_ids_key!r}; its keys: {_present(row)}"
            raise row.fault("no-prompt", problem, f"set data.prompt_key to its key{_or_format(row)}")
        if isinstance(prompt, str) and not prompt:
            raise row.fault("empty-prompt", f"{key!r} is empty", "remove the row")
        self._require_text(row, key, prompt)
        if isinstance(prompt, str) and not self._config.apply_chat_template:
            return self._tokenizer.encode(prompt, add_special_tokens=True)
        return self._render(row, self._as_messages(row, prompt))

    def _render(self, row: Row, messages: Any) -> list[int]:
        key = self._config.prompt_key
        fits = isinstance(messages, list) and messages and all(_is_message(message) for message in messages)
        if not fits:
            problem = f"{key!r} is neither text nor a list of messages with text in `role` and `content`"
            raise row.fault("bad-prompt", problem)
        for unlikely in filter(None, (role_problem(message["role"]) for message in messages)):
            raise row.fault("bad-prompt", f"{key!r}: {unlikely}")
        if messages[-1]["role"] == "assistant":
            problem = f"{key!r} ends with a message of the assistant, and the model would start another one"
            raise row.fault("bad-prompt", problem, "remove that message, or set data.messages_key for demonstrations")
        if not self._config.apply_chat_template:
            remedy = "set data.apply_chat_template: true, or give text"
            raise row.fault("template-needed", f"{key!r} is a list of messages", remedy)
        if self._tokenizer.chat_template is None:
            remedy = "set data.apply_chat_template: false, or give it one"
            raise row.fault("no-chat-template", "the tokenizer has no chat template", remedy)
        try:
            text = self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        except Exception as error:  # templates are programs of the checkpoint and can raise anything
            said, remedy = template_fault(error)
            raise row.fault("template-failed", f"the chat template rejects {key!r} ({said})", remedy) from error
        return self._tokenizer.encode(text, add_special_tokens=False)

    def _require_text(self, row: Row, key: str, value: Any) -> None:
        if not self._config.allow_special_tokens:
            require_text(row, key, value, self._special)

    def _answer(self, row: Row) -> str:
        """Return the answer as text. Only demonstrations may have none."""
        value = row.get(self._config.answer_key)
        if value is None and self._need_response:
            return ""
        if value is None:
            problem = f"has no answer {self._config.answer_key!r}; its keys: {_present(row)}"
            raise row.fault("bad-answer", problem, f"set data.answer_key to its key{_or_format(row)}")
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            problem = f"the answer {self._config.answer_key!r} {_found(value)}"
            raise row.fault("bad-answer", problem, "give text or a number, or set data.answer_key")
        if isinstance(value, float) and not math.isfinite(value):
            problem = f"the answer {self._config.answer_key!r} is {value}, which no response can equal"
            raise row.fault("bad-answer", problem, "correct it")
        return str(value)

    def _response_tokens(self, row: Row) -> list[int] | None:
        """Encode the response separately from the prompt, so the boundary is the same as in a rollout. EOS ends it."""
        key = self._config.response_key
        value = row.get(key)
        if not self._need_response and not isinstance(value, str):
            return None
        if not isinstance(value, str) or not value:
            problem = f"the demonstration {key!r} {_found(value)}"
            raise row.fault("bad-demonstration", problem, "give text, or set data.response_key")
        self._require_text(row, key, value)
        eos = self._tokenizer.eos_token_id
        if eos is None:
            problem = "the tokenizer has no EOS token to end the demonstration with"
            raise row.fault("no-eos", problem, "set eos_token in its files")
        return [*self._tokenizer.encode(value, add_special_tokens=False), eos]


def require_text(row: Row, key: str, value: Any, special: re.Pattern[str]) -> None:
    """Reject text that would end a turn or speak for someone else.

    Such text is not encoded as plain text instead: a hand-written template would silently lose its meaning.
    """
    found = next(filter(None, map(special.search, _texts(value))), None)
    if found is not None:
        problem = f"{key!r} spells the special token {found[0]!r}"
        remedy = "remove it, or, if a token is meant, set data.allow_special_tokens: true"
        raise row.fault("special-token", problem, remedy)


def _texts(value: Any) -> Iterator[str]:
    """Yield every text of a prompt. A template may show any field of a message, and field names too."""
    left = [value]
    while left:
        match left.pop():
            case str() as text:
                yield text
            case list() as items:
                left += items
            case dict() as fields:
                left += [*fields, *fields.values()]


def _found(value: Any) -> str:
    return "is missing" if value is None else "is empty" if value == "" else f"is a {type(value).__name__}"


def _present(row: Row) -> str:
    return ", ".join(list(map(repr, row.values))[:_SHOWN]) or "none"


def _or_format(row: Row) -> str:
    form = fitting_format(row)
    return f", or data.format to {form}, which this row fits" if form is not None else ""


def _is_message(message: Any) -> bool:
    return (
        isinstance(message, dict) and isinstance(message.get("role"), str) and isinstance(message.get("content"), str)
    )
