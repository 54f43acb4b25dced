"""A call of an agent, whatever protocol it speaks, and its rejection."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel, ValidationError

from slime_like.agents.messages import Message, Tool

_SHOWN_CHARS = 80

_LABELS = {"user", "metadata", "store", "safety_identifier", "prompt_cache_key"}
"""For the books of a service: they ask nothing of the model."""
_SHAPING = {"guided_json", "guided_regex", "guided_choice", "guided_grammar", "structured_outputs", "functions",
            "continue_final_message", "prompt_logprobs", "top_logprobs"}  # fmt: skip
"""An answer without them would not be what the client counts on."""

FORCED = "tool_choice"
"""A call of a tool cannot be forced on a model that is trained on what it samples: a wish, as settings of sampling."""


class CallRejected(Exception):
    """A call that has no answer.

    Attributes:
        status: of HTTP.
        code: stable name of the reason.
        problem: one sentence.
        retry: whether the client should try again.
    """

    def __init__(self, status: int, code: str, problem: str, retry: bool = False) -> None:
        self.status = status
        self.code = code
        self.problem = problem
        self.retry = retry
        super().__init__(problem)


@dataclass(frozen=True, slots=True)
class Call:
    """A request for one turn.

    Attributes:
        model: the name that the client gave; the answer repeats it.
        stream: the answer is a stream of server-sent events.
        usage_chunk: a stream of the OpenAI protocol ends with the number of tokens.
        ignored: settings that the client asked for; those of the run hold.
    """

    messages: tuple[Message, ...]
    tools: tuple[Tool, ...]
    model: str = ""
    stream: bool = False
    usage_chunk: bool = False
    ignored: Mapping[str, Any] = field(default_factory=dict)


def parse(model: type[BaseModel], body: Any) -> Any:
    """``body`` as a ``model``. Raises ``CallRejected`` with the first field that is wrong."""
    if not isinstance(body, dict):
        raise CallRejected(400, "invalid_request", f"the body is a {type(body).__name__}; give a JSON object")
    try:
        return model.model_validate(body)
    except ValidationError as error:
        errors = error.errors(include_url=False, include_input=False, include_context=False)
        # Of the forms that a field may have, the one that fits best; its name in this program is none of the field's.
        first = max(errors, key=lambda each: len(each["loc"]))
        names = (str(part) for part in first["loc"])
        field_name = ".".join(name for name in names if "[" not in name and name != "str") or "body"
        raise CallRejected(400, "invalid_request", f"{field_name}: {first['msg']}") from error


def wishes(request: BaseModel, forced: Any = None) -> dict[str, Any]:
    """What a body asks for that this endpoint does not read, short enough to be kept; ``forced``: a tool.

    Raises:
        CallRejected: a setting among them would change what the model samples.
    """
    given = {name: value for name, value in (request.model_extra or {}).items() if value is not None}
    for name in sorted(_SHAPING & given.keys()):
        if given[name]:
            raise unsupported(name, given[name])
    found = {name: value for name, value in given.items() if name not in _LABELS | _SHAPING}
    if forced is not None:
        found[FORCED] = forced
    return {name: value if isinstance(value, int) else str(value)[:_SHOWN_CHARS] for name, value in found.items()}


def unsupported(setting: str, value: Any) -> CallRejected:
    """Rejection of a setting that would change what the model samples from."""
    return CallRejected(
        400, "unsupported_parameter", f"{setting}={str(value)[:_SHOWN_CHARS]!r} is not supported; leave it out"
    )
