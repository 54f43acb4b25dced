"""Encoding of rows to token ids."""

import copy
import json
from array import array
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, TypeVar

from slime_like.config import DataConfig
from slime_like.data.chat_template import ChatTemplate, SpanFault
from slime_like.data.messages import TOOLS_KEY, Messages, read_conversation, read_messages, read_tools, spells_messages
from slime_like.data.rows import Row, fitting_format, in_format
from slime_like.errors import DataError
from slime_like.interfaces.samples import PromptInput
from slime_like.models.tokenization import special_token_pattern, with_template_variables
from slime_like.models.tower import placeholder_ids
from slime_like.plugins.options import load_option

_SHOWN = 10
"""Limit on the keys named in an error about a row without a prompt."""
_TEMPLATE_REMEDY = "set data.apply_chat_template: true"

_T = TypeVar("_T")
_Encoding = Generator[str, list[int], _T]
"""Steps of a row's encoding. Each yields a text and receives its tokens."""


@dataclass(frozen=True, slots=True)
class EncodedRow:
    """A prompt, with its answer, settings for an environment, and, if they are kept, its chat messages and whole row as
    JSON. Ids are machine integers: Python integers for a million prompts would fill the memory.

    Attributes:
        response_tokens: ids of the demonstration, with the token that ends it; ``None`` if the row has none.
        spans: ``[start, end)`` in ``response_tokens`` of the tokens that carry loss; ``None`` means all.
        forks: indices in ``response_tokens`` at which another training row of the conversation begins.
    """

    input: PromptInput
    answer: str
    response_tokens: Sequence[int] | None
    environment: dict[str, Any] | None
    spans: tuple[tuple[int, int], ...] | None = None
    forks: tuple[int, ...] = ()
    messages: str | None = None
    whole_row: str | None = None
    has_tools: bool = False

    @property
    def total_len(self) -> int:
        """Number of tokens of the longest training row."""
        borders = pairwise((-len(self.input.token_ids), *self.forks, len(self.response_tokens or ())))
        return max(end - start for start, end in borders)


class RowEncoder:
    """Encodes rows by the keys of ``DataConfig``. Every fault is a ``DataError`` that names file and line.

    Args:
        need_response: whether all rows must have a demonstration: a response, or with ``messages_key`` a conversation.
        stop_token_ids: tokens that may end an assistant's turn; by default, the tokenizer's EOS token.
        keep_messages: whether rows keep their chat messages, for agents.
        keep_row: whether rows are kept whole, for reward functions. Values that JSON lacks become text.
    """

    def __init__(
        self,
        tokenizer: Any,
        config: DataConfig,
        need_response: bool,
        stop_token_ids: Sequence[int] = (),
        keep_messages: bool = False,
        need_answer: bool = False,
        keep_row: bool = False,
    ) -> None:
        self._tokenizer = with_template_variables(tokenizer, config.chat_template_kwargs)
        self._template = ChatTemplate(self._tokenizer, stop_token_ids)
        if unread := self._template.unread(config.chat_template_kwargs):
            problem, who = "the chat template reads no such variable", f"data.chat_template_kwargs.{unread[0]}"
            raise DataError(problem, code="unread-variable", who=who, remedy="correct the name, or remove it")
        self._config = config
        self._need_response = need_response
        self._keep_messages = keep_messages
        self._need_answer = need_answer and not need_response
        self._keep_row = keep_row
        self._vocab_size = len(tokenizer)
        self._system = [] if config.system_prompt is None else [{"role": "system", "content": config.system_prompt}]
        self._special = special_token_pattern(tokenizer)
        self._placeholders = placeholder_ids(Path(tokenizer.name_or_path))
        self._stop_token_ids = stop_token_ids

    def encode(self, row: Row) -> EncodedRow:
        [found] = self.encode_all([row])
        if isinstance(found, DataError):
            raise found
        return found

    def encode_all(self, rows: Sequence[Row]) -> list[EncodedRow | DataError]:
        """Encode rows. A bad row's fault is in its place. Tokenizing all texts together takes a third of the time."""
        found: dict[int, EncodedRow | DataError] = {}
        under_way: list[tuple[int, _Encoding[EncodedRow], Any]]
        under_way = [(index, self._encode(row), None) for index, row in enumerate(rows)]
        while under_way:
            texts = []
            for index, steps, tokens in under_way:
                try:
                    texts.append((index, steps, steps.send(tokens)))
                except StopIteration as end:
                    found[index] = end.value
                except DataError as fault:
                    found[index] = fault
            together = self._tokenizer([text for *_, text in texts], add_special_tokens=False) if texts else {}
            every = together.get("input_ids", [])
            under_way = [(index, steps, ids) for (index, steps, _), ids in zip(texts, every, strict=True)]
        return [found[index] for index in range(len(rows))]

    def _encode(self, row: Row) -> _Encoding[EncodedRow]:
        key = self._config.messages_key if self._need_response else None
        encoded = (yield from self._encode_prompt(row)) if key is None else self._encode_conversation(row, key)
        row.require_text(chain(encoded.input.token_ids, encoded.response_tokens or ()), self._placeholders)
        return encoded

    def _encode_prompt(self, row: Row) -> _Encoding[EncodedRow]:
        whole = json.dumps(row.values, default=str) if self._keep_row else None
        row = in_format(row, self._config)
        ids, prompt, tools = row.get(self._config.token_ids_key), None, None
        if ids is not None:
            tokens = row.token_ids(self._config.token_ids_key, ids, self._vocab_size, "tokenizer")
        else:
            prompt, tools = self._read_prompt(row), read_tools(row)
            tokens = yield from self._render(row, prompt, tools)
        if not tokens:
            problem = "the prompt has no token"
            raise row.fault("empty-prompt", problem, "a model cannot start from nothing, remove the row")
        answer, response = self._answer(row), (yield from self._response_tokens(row, isinstance(prompt, list)))
        messages = _for_agents(prompt) if self._keep_messages and prompt is not None else None
        given = (PromptInput(array("i", tokens)), answer, response and array("i", response), self._environment(row))
        return EncodedRow(*given, messages=messages, whole_row=whole, has_tools=bool(tools))

    def _read_prompt(self, row: Row) -> str | Messages:
        """Return the prompt: a text for the tokenizer, or messages for the chat template, the system prompt first."""
        key = self._config.prompt_key
        given = row.get(key)
        if given is None:
            problem = f"has no value under {key!r} or {self._config.token_ids_key!r}; its keys: {_present(row)}"
            remedy = f"set data.prompt_key to the key of the prompt{_or_format(row)}, or remove the row"
            raise row.fault("no-prompt", problem, remedy)
        if given == "":
            raise row.fault("empty-prompt", f"{key!r} is empty", "remove the row")
        if other := next(filter(row.get, ("images", "image", "videos", "audios")), None):
            raise row.fault("not-text", f"has {other!r}, but only text is supported", "remove the row, or the column")
        self._require_text(row, key, given)
        if not isinstance(given, str) or spells_messages(given):
            messages = read_messages(row, key, "bad-prompt")
            self._require_text(row, key, messages)
        elif not self._config.apply_chat_template:
            return given
        else:
            messages = [{"role": "user", "content": given}]
        if self._system and any(message["role"] == "system" for message in messages):
            problem = f"{key!r} has a system message, and data.system_prompt is set"
            raise row.fault("two-system-prompts", problem, "remove one")
        return [*self._system, *messages]

    def _encode_conversation(self, row: Row, key: str) -> EncodedRow:
        messages, tools = read_conversation(row, key)
        self._require_text(row, key, [messages, tools])
        with _located(row, key):
            rows = self._conversations.encode(messages, tools)
        first = rows[0][1][0][0]
        prompt, response = PromptInput(array("i", rows[0][0][:first])), array("i")
        spans, starts = list[tuple[int, int]](), list[int]()
        for tokens, found in rows:
            starts.append(len(response) - (0 if starts else first))
            spans += [(starts[-1] + start, starts[-1] + end) for start, end in found]
            response.extend(tokens if starts[1:] else tokens[first:])
        answer, environment = self._answer(row), self._environment(row)
        return EncodedRow(prompt, answer, response, environment, tuple(spans), forks=tuple(starts[1:]))

    @cached_property
    def _conversations(self) -> Any:
        return load_option("conversation-encoder")(self._tokenizer, self._stop_token_ids)

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

    def _render(self, row: Row, prompt: str | Messages, tools: list[dict[str, Any]] | None) -> _Encoding[list[int]]:
        key = self._config.prompt_key
        self._require_text(row, TOOLS_KEY, tools)
        if isinstance(prompt, str):
            if tools:
                raise row.fault("tools-not-rendered", f"{key!r} is text without {TOOLS_KEY!r}", _TEMPLATE_REMEDY)
            return _plain_prompt(self._tokenizer, prompt)
        if prompt[-1]["role"] == "assistant":
            problem = f"{key!r} ends with a message of the assistant, and the model would start another one"
            raise row.fault("bad-prompt", problem, "remove that message, or set data.messages_key for demonstrations")
        if not self._config.apply_chat_template:
            raise row.fault("template-needed", f"{key!r} is a list of messages", f"{_TEMPLATE_REMEDY}, or give text")
        with _located(row, key):
            return (yield self._template.prompt(prompt, tools))

    def _require_text(self, row: Row, key: str, value: Any) -> None:
        """Reject text that would end a turn or speak for someone else.

        Such text is not encoded as plain text instead: a hand-written template would silently lose its meaning.
        """
        if self._config.allow_special_tokens:
            return
        found = next(filter(None, map(self._special.search, _texts(value))), None)
        if found is not None:
            problem = f"{key!r} spells the special token {found[0]!r}"
            remedy = "remove it, or, if a token is meant, set data.allow_special_tokens: true"
            raise row.fault("special-token", problem, remedy)

    def _answer(self, row: Row) -> str:
        value = row.get(self._config.answer_key)
        if value is None and self._need_answer:
            problem = f"has no answer {self._config.answer_key!r}; its keys: {_present(row)}"
            raise row.fault("bad-answer", problem, f"set data.answer_key to its key{_or_format(row)}")
        try:
            return answer_text(value)
        except (TypeError, ValueError, RecursionError) as error:
            problem = f"the answer {self._config.answer_key!r} cannot be used ({error})"
            raise row.fault("bad-answer", problem, "correct it, or set data.answer_key") from error

    def _response_tokens(self, row: Row, is_turn: bool) -> _Encoding[list[int] | None]:
        """Encode the response separately from the prompt, as in a rollout. A chat's turn ends like the template's."""
        if not self._need_response:
            return None
        key = self._config.response_key
        value = row.get(key)
        if not isinstance(value, str) or not value:
            problem = f"the demonstration {key!r} {_found(value)}"
            raise row.fault("bad-demonstration", problem, "give text, or set data.response_key")
        self._require_text(row, key, value)
        if is_turn:
            with _located(row, key):
                return (yield value + self._template.end)
        eos = self._tokenizer.eos_token_id
        if eos is None:
            problem = "the tokenizer has no EOS token to end the demonstration with"
            raise row.fault("no-eos", problem, "set eos_token in its files")
        return [*(yield value), eos]


def _for_agents(prompt: str | Messages) -> str:
    """Return messages as JSON in the form of OpenAI's protocol, in which arguments of tool calls are JSON text."""
    messages: Messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else copy.deepcopy(prompt)
    for function in (call["function"] for message in messages for call in message.get("tool_calls", ())):
        function["arguments"] = json.dumps(function["arguments"], ensure_ascii=False)
    return json.dumps(messages)


def answer_text(value: Any) -> str:
    """Return a row's answer as reward functions get it: text and numbers as text, no answer as an empty text.

    Several right answers become a JSON list of texts, a mapping and a truth value JSON. Raises ``TypeError`` or
    ``ValueError`` if JSON cannot express it, or no response can equal it.
    """
    if value is None or isinstance(value, str):
        return value or ""
    if isinstance(value, list) and all(isinstance(item, str | int | float) for item in value):
        value = [answer_text(item) for item in value]
    if value in ([], {}):
        raise ValueError("it is empty")
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    return text if isinstance(value, bool | list | dict) else str(value)


def _plain_prompt(tokenizer: Any, text: str) -> list[int]:
    """Encode a text with what the tokenizer adds in front, unless it begins with that. Nothing is added at the end."""
    whole, plain = (list(tokenizer.encode(text, add_special_tokens=added)) for added in (True, False))
    for start in range(len(whole) - len(plain) + 1):
        if whole[start : start + len(plain)] == plain:
            return plain if plain[:start] == whole[:start] else whole[: start + len(plain)]
    return whole  # a tokenizer whose own tokens change how the text is split


@contextmanager
def _located(row: Row, key: str) -> Iterator[None]:
    try:
        yield
    except SpanFault as fault:
        raise row.fault(fault.code, f"{key!r}: {fault.problem}", fault.remedy) from fault


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
