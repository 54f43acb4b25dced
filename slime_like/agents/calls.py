"""Calls of agents in a form shared by all protocols, and their rejection."""

import json
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from pydantic import AliasChoices, BaseModel, Field, ValidationError

from slime_like.agents.rendering import TEXT, Message, Tool

MODEL = "policy"
"""Model name that agents are given. Calls may use any other name."""

_SHOWN_CHARS = 80

_LABELS = {"user", "metadata", "store", "safety_identifier", "prompt_cache_key"}
"""Bookkeeping fields of a service. They don't change what the model samples."""
_SHAPING = {"guided_json", "guided_regex", "guided_choice", "guided_grammar", "structured_outputs", "functions",
            "response_format", "text.format", "output_format", "output_config.format", "structural_tag", "json_schema",
            "regex", "ebnf", "grammar", "continue_final_message", "logprobs", "prompt_logprobs", "top_logprobs", "n",
            "logit_bias", "previous_response_id", "conversation", "background"}  # fmt: skip
"""Fields that change the answer. A client that sends one counts on it, so the call is rejected."""
_PLAIN: Any = {"type": "text"}
"""Format of an answer, or of a custom tool's input, that asks for nothing."""

_KINDS = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}


class CallRejected(Exception):
    """A call that gets no answer. ``status`` is HTTP's. ``retry``: the client should try again."""

    def __init__(self, status: int, code: str, problem: str, retry: bool = False) -> None:
        self.status = status
        self.code = code
        self.problem = problem
        self.retry = retry
        super().__init__(problem)

    def kind(self, of_server: str) -> str:
        """Return the protocols' type of error. ``of_server`` is the type of an error that is not the client's."""
        return _KINDS.get(self.status, "invalid_request_error" if self.status < 500 else of_server)


@dataclass(frozen=True, slots=True)
class Call:
    """A request for one turn.

    Attributes:
        model: name that the client gave; the answer repeats it.
        usage_chunk: whether an OpenAI-protocol stream ends with token counts.
        stop: texts that end the turn. They are sampled, but not part of the answer.
        variables: variables of the chat template, besides the run's.
        text_tools: names of custom tools, which take one text instead of arguments.
        ignored: settings that the client asked for; the run's settings apply instead.
    """

    messages: tuple[Message, ...]
    tools: tuple[Tool, ...]
    model: str = ""
    stream: bool = False
    usage_chunk: bool = False
    stop: tuple[str, ...] = ()
    variables: Mapping[str, Any] = field(default_factory=dict)
    text_tools: frozenset[str] = frozenset()
    ignored: Mapping[str, Any] = field(default_factory=dict)
    id: str = field(default_factory=lambda: secrets.token_hex(12))


class Text(BaseModel):
    """A part of a message's content. A refusal is text, too."""

    type: Literal["text", "input_text", "output_text", "summary_text", "reasoning_text", "refusal"]
    text: str = Field(validation_alias=AliasChoices("text", "refusal"))


Content = str | list[Text]


def text_of(content: Content | None) -> str:
    """Join the text of a message's parts, one per line."""
    return content if isinstance(content, str) else "\n".join(part.text for part in content or ())


def parse(model: type[BaseModel], body: Any) -> Any:
    """Parse ``body`` as a ``model``. Raises ``CallRejected`` with the first invalid field."""
    if not isinstance(body, dict):
        raise CallRejected(400, "invalid_request", f"the body is a {type(body).__name__}; give a JSON object")
    try:
        return model.model_validate(body)
    except ValidationError as error:
        # Report the best-fitting alternative of a union. Its class name and "str" are not part of the field's name.
        first = max(error.errors(include_url=False), key=lambda each: len(each["loc"]))
        names = [str(part) for part in first["loc"] if "[" not in str(part) and part != "str"]
        problem, kind = first["msg"], first.get("ctx", {}).get("tag")
        if first["type"] == "literal_error" and names[-1] == "type":
            kind = names[-1] = str(first["input"])[:_SHOWN_CHARS]
        elif kind:
            names.append(kind)
        if kind:  # Claude Code reads the path and this wording, and sends the message again without the image
            problem = "images are not supported" if "image" in kind else f"{kind} is not supported"
        raise CallRejected(400, "invalid_request", f"{'.'.join(names) or 'body'}: {problem}") from error


def wishes(request: BaseModel, choice: Any = None) -> dict[str, Any]:
    """Return requested settings that this endpoint does not read, shortened. ``choice`` is the tool choice.

    Raises ``CallRejected`` if a setting would change what the model samples.
    """
    given = {name: value for name, value in (request.model_extra or {}).items() if value is not None}
    formats = {f"{name}.format": value.get("format") for name, value in given.items() if isinstance(value, dict)}
    for name, value in sorted((given | formats).items()):
        if name in _SHAPING and value and value != (1 if name == "n" else _PLAIN):
            problem = f"{name}={str(value)[:_SHOWN_CHARS]!r} is not supported; leave it out"
            raise CallRejected(400, "unsupported_parameter", problem)
    found = {name: value for name, value in given.items() if name not in _LABELS | _SHAPING}
    if choice not in (None, "auto", "none"):
        found["tool_choice"] = choice  # training needs freely sampled tokens
    return {name: value if isinstance(value, int) else str(value)[:_SHOWN_CHARS] for name, value in found.items()}


def pair_results(messages: Iterable[Message]) -> tuple[Message, ...]:
    """Name the call that each tool's result answers, by id, and put a turn's results in the order of the calls.

    Raises ``CallRejected`` if calls are in front of a result, but none without a result has its id.
    """
    paired, turn, waiting = [*messages], 0, dict[str, list[tuple[int, int, dict[str, Any]]]]()
    found = list[tuple[int, int, int, int, Message]]()
    for place, message in enumerate(paired):
        if message.role == "assistant":
            turn += 1
            waiting |= {call.id: [] for call in message.tool_calls}  # some clients use an id again in a later turn
            for index, shown in enumerate(message.for_template().get("tool_calls", ())):
                waiting[message.tool_calls[index].id].append((turn, index, shown))
        elif message.role == "tool" and waiting:  # without any call, the client reads calls from the text itself
            if not waiting.get(message.call_id):
                problem = f"no call without a result in front of it has the id {message.call_id[:_SHOWN_CHARS]!r}"
                raise CallRejected(400, "unpaired_tool_result", f"a tool's result: {problem}; send one for each call")
            called, index, shown = waiting[message.call_id].pop(0)
            answer = replace(message, call_id=shown["id"], name=shown["function"]["name"])
            found.append((turn, called, index, place, answer))
    for (*_, place, _), (*_, answer) in zip(found, sorted(found, key=lambda each: each[:4]), strict=True):
        paired[place] = answer
    return tuple(paired)


def describe_tool(given: Mapping[str, Any], of_text: bool) -> Tool:
    """Describe a function, or a custom tool as a function of one text. A grammar is shown, but not enforced."""
    if of_text:
        form, said = given.get("format") or _PLAIN, str(given.get("description") or "")
        said += "" if form == _PLAIN else f"\n\nFormat of {TEXT}: {json.dumps(form, ensure_ascii=False)}"
        parameters = {"type": "object", "properties": {TEXT: {"type": "string"}}, "required": [TEXT]}
        given = {"name": given["name"], "description": said, "parameters": parameters}
    return {"type": "function", "function": given}


def server_sent(kind: str, data: Mapping[str, Any]) -> str:
    """Return a named server-sent event. Its data repeats the name as ``type``."""
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **data}, ensure_ascii=False)}\n\n"
