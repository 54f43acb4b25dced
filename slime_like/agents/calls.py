"""Calls of agents in a form shared by all protocols, and their rejection."""

import json
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import AliasChoices, BaseModel, Field, ValidationError

from slime_like.agents.messages import Message, Tool

MODEL = "policy"
"""Model name that agents are given. Calls may use any other name."""

_SHOWN_CHARS = 80

_LABELS = {"user", "metadata", "store", "safety_identifier", "prompt_cache_key"}
"""Bookkeeping fields of a service. They don't change what the model samples."""
_SHAPING = {"guided_json", "guided_regex", "guided_choice", "guided_grammar", "structured_outputs", "functions",
            "continue_final_message", "prompt_logprobs", "top_logprobs", "previous_response_id", "conversation",
            "background"}  # fmt: skip
"""Fields that change the answer. A client that sends one counts on it, so the call is rejected."""

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
        ignored: settings that the client asked for; the run's settings apply instead.
    """

    messages: tuple[Message, ...]
    tools: tuple[Tool, ...]
    model: str = ""
    stream: bool = False
    usage_chunk: bool = False
    stop: tuple[str, ...] = ()
    variables: Mapping[str, Any] = field(default_factory=dict)
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
    for name in sorted(_SHAPING & given.keys()):
        if given[name]:
            raise unsupported(name, given[name])
    found = {name: value for name, value in given.items() if name not in _LABELS | _SHAPING}
    if choice not in (None, "auto", "none"):
        found["tool_choice"] = choice  # training needs freely sampled tokens
    return {name: value if isinstance(value, int) else str(value)[:_SHOWN_CHARS] for name, value in found.items()}


def server_sent(kind: str, data: Mapping[str, Any]) -> str:
    """Return a named server-sent event. Its data repeats the name as ``type``."""
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **data}, ensure_ascii=False)}\n\n"


def unsupported(setting: str, value: Any) -> CallRejected:
    """Build the rejection of a setting that would change what the model samples from."""
    return CallRejected(
        400, "unsupported_parameter", f"{setting}={str(value)[:_SHOWN_CHARS]!r} is not supported; leave it out"
    )
