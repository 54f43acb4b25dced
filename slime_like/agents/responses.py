"""Thinking and tool calls in a model's text, read in the form in which its chat template writes them.

A form is a response template of transformers. Reading is strict: if any call is cut off or does not parse, the text
stays text. Calls inside thinking are drafts.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import yaml

from slime_like.agents.arguments import python_calls, typed_arguments
from slime_like.agents.messages import Message, Tool, ToolCall
from slime_like.agents.rendering import ChatFormat
from slime_like.config import RunConfig
from slime_like.errors import ConfigError
from slime_like.models.special_tokens import special_token_pattern

_SETTING = "rollout.agent.tool_parser"
_THOUGHTS = ("thinking", "reasoning_content", "reasoning")
_MARK = re.compile(r"<|\[(?=[A-Z/])")
_CUT = "\ufdd2"
"""Inserted into marks inside JSON, where they are text. It is a Unicode noncharacter."""

OPENING_TOKENS = 64
"""Number of tokens at the end of a prompt that decide whether it opens thinking."""

_PROBE: Tool = {
    "type": "function",
    "function": {
        "name": "zap",
        "description": "d",
        "parameters": {"type": "object", "properties": {"k": {"type": "integer"}, "s": {"type": "string"}}},
    },
}
_PROBED = {"k": 1, "s": "5"}


@dataclass(frozen=True)
class ResponseForm:
    """A form of thinking and tool calls.

    Attributes:
        template: response template of transformers.
        has_calls: whether tool calls are read.
        shows_thinking: whether the chat template knows thinking. If not, a message's content keeps it, because no
            history could show it otherwise.
        text_arguments: whether the chat template expects the arguments of calls as JSON text.
    """

    template: Mapping[str, Any] = field(repr=False)
    has_calls: bool = False
    shows_thinking: bool = True
    text_arguments: bool = False

    def message(self, prompt: str, text: str, tools: Sequence[Tool]) -> Message:
        """Convert a turn to a message.

        Args:
            prompt: the prompt, or its end, which may open thinking.
            text: the turn without the token that ended it.
            tools: tools that the model was offered. Without any, there are no calls.
        """
        prefix = self._prefix(prompt)
        try:
            content, thinking, calls = self._read(prefix, text, tools)
            if calls and not (tools and self.has_calls):
                raise ValueError("calls are text here")
        except (ValueError, RecursionError):
            found, _ = self._parsed(self._bare, prefix, text)
            content, thinking, calls = found.get("content") or "", _thinking(found), ()
        if thinking and not (self.shows_thinking or self._is_open(prefix)):
            end = self._thought.close_re.search(text)
            content, thinking = (text[: end.end()] + content if calls else text), ""
        return Message("assistant", content.strip() if calls else content, tuple(calls), reasoning=thinking)

    def marked(self, prompt: str, text: str) -> str:
        """Return a turn as reward functions and environments read it, with thinking in ``<think>...</think>``.

        Thinking that the prompt opens gets its opening mark.
        """
        prefix = self._prefix(prompt)
        whole = prefix + text if self._is_open(prefix) else text
        thought = self._thought
        if thought is None or thought.open_re is None or "<think>" in thought.open_re.pattern:
            return whole
        said, at = "", 0
        while (start := thought.open_re.search(whole, at)) is not None:
            end = thought.close_re.search(whole, start.end())
            inner = whole[start.end() : end.start() if end else None]
            said += f"{whole[at : start.start()]}<think>{inner}{'</think>' if end else ''}"
            at = end.end() if end else len(whole)
        said += whole[at:]
        for name, pattern in (("header", "open_re"), ("content", "close_re")):
            marks = getattr(self._loaded.fields.get(name), pattern, None)
            said = said if marks is None else marks.sub("", said)
        return said

    @cached_property
    def _loaded(self) -> Any:
        return _load(self.template)

    @cached_property
    def _bare(self) -> Any:
        """The form of thinking only. All other text is content, as it stands."""
        rest = {"content": "text", "content_args": {"strip": False}, "repeats": True, "join": ""}
        thoughts = {name: spec for name, spec in self.template["fields"].items() if name in _THOUGHTS}
        return _load({**self.template, "fields": {**thoughts, "content": rest}})

    @property
    def _thought(self) -> Any:
        return next((spec for name, spec in self._loaded.fields.items() if name in _THOUGHTS), None)

    def _prefix(self, prompt: str) -> str:
        """Return the part of the turn that the prompt has already written."""
        found = [mark.end() for mark in self._loaded.start_anchor_re.finditer(prompt)]
        return prompt[found[-1] :] if found else ""

    def _is_open(self, prefix: str) -> bool:
        """Return whether the turn continues thinking that the prompt has opened."""
        return _CUT in _thinking(self._parsed(self._bare, prefix, _CUT)[0])

    def _read(self, prefix: str, text: str, tools: Sequence[Tool]) -> tuple[str, str, Sequence[ToolCall]]:
        """Return content, thinking and calls. Raises ``ValueError`` if a call is cut off or does not parse."""
        masked = self._masked(text)
        found, bodies = self._parsed(self._loaded, prefix, masked)
        content, thinking = (found.get("content") or "").replace(_CUT, ""), _thinking(found).replace(_CUT, "")
        spec = self._loaded.fields.get("tool_calls")
        if spec is None or not found.get("tool_calls"):
            return content, thinking, ()
        tail = spec.open_re.search(content, partial=True)
        if tail is not None and tail.group().strip():
            raise ValueError("a call is cut off in its opening mark")
        ended = None if self._thought is None or thinking else self._thought.close_re
        if ended is not None and ended.search(content):  # thinking without its opening mark
            *_, mark = ended.finditer(masked)
            content, _, calls = self._read("", masked[mark.end() :], tools)
            return content, masked[: mark.start()].replace(_CUT, ""), calls
        if (tags := spec.content_args.get("tag_pattern")) is not None:
            from regex import DOTALL, sub

            if any(sub(tags, "", body, flags=DOTALL).strip() for body in bodies):
                raise ValueError("an argument is not closed")
        given = found["tool_calls"] if isinstance(found["tool_calls"], list) else [found["tool_calls"]]
        as_text = spec.content in ("xml-inline", "kv-lines")
        return content, thinking, [call for one in given for call in _calls(one, tools if as_text else None)]

    def _parsed(self, loaded: Any, prefix: str, text: str) -> tuple[dict[str, Any], list[str]]:
        """Parse a turn, and return what the calls enclose, too. Raises ``ValueError`` if a call is cut off."""
        from transformers.utils.chat_parsing import ResponseParser

        parser = ResponseParser(loaded, prefix=prefix)
        events = parser.feed(text)
        found, last = parser.finalize()
        calls = loaded.fields.get("tool_calls")
        is_last = any(event["type"] == "region_close" and event["field"] == "tool_calls" for event in last)
        if is_last and not any(mark.end() == len(text) for mark in calls.close_re.finditer(text)):
            raise ValueError("a call is cut off")
        bodies: list[str] = []
        for event in [*events, *last]:
            if event["field"] == "tool_calls" and event["type"] == "region_open":
                bodies.append("")
            elif event["field"] == "tool_calls" and event["type"] == "region_chunk":
                bodies[-1] += event["text"]
        return found, bodies

    def _masked(self, text: str) -> str:
        """Insert a cut into marks inside the JSON of calls, so they do not end the call."""
        spec = self._loaded.fields.get("tool_calls")
        if spec is None or spec.content != "json" or spec.content_args.get("string_delims"):
            return text
        said, at = "", 0
        for mark in spec.open_re.finditer(text):
            start = len(text) - len(text[mark.end() :].lstrip())
            try:
                end = json.JSONDecoder().raw_decode(text, start)[1] if start >= at else at
            except (ValueError, RecursionError):
                continue
            if start >= at:
                said += text[at:start] + _MARK.sub(rf"\g<0>{_CUT}", text[start:end])
                at = end
        return said + text[at:]


def response_form(tokenizer: Any, setting: str = "auto") -> ResponseForm:
    """Return the form that reads back a call as the chat template writes it.

    The checkpoint's own ``response_template`` is tried first. If no form fits, only thinking is read.

    Args:
        setting: ``auto``; ``none``: read no calls; the name of a form; or a JSON file with a response template.

    Raises:
        ConfigError: the setting names no form, or the file is not a response template.
    """
    probes = list(_probes(tokenizer))
    if setting not in ("auto", "none"):
        form = _as_form(tokenizer, _named(setting))
        fits = [as_text for prompt, text, as_text in probes if _reads_back(form, prompt, text)]
        return replace(form, text_arguments=bool(fits and fits[0]), has_calls="tool_calls" in form.template["fields"])
    own = getattr(tokenizer, "response_template", None)
    for template in [*([own] if own is not None else []), *_forms().values()]:
        form = _as_form(tokenizer, template)
        for prompt, text, as_text in probes:
            if _reads_back(form, prompt, text):
                return replace(form, has_calls=setting == "auto", text_arguments=as_text)
    return _as_form(tokenizer, _forms()["thinking"])


def require_calls(tokenizer: Any, config: RunConfig) -> None:
    """Raise ``ConfigError`` if agents would be shown tools, but calls in the chat template's form cannot be read."""
    setting = config.rollout.agent.tool_parser
    if not config.rollout.agent.is_set or setting == "none" or tokenizer.chat_template is None:
        return
    if response_form(tokenizer, setting).has_calls or not ChatFormat(tokenizer).renders_tools:
        return
    written = next((text for _, text, _ in _probes(tokenizer) if "zap" in text), None)
    problem = "renders tools, but no calls"
    if written is not None:
        problem = f"writes calls as `{written}`, which no known form reads back"
    remedy = "give a response template (JSON), or ship one in tokenizer_config.json"
    raise ConfigError(
        [f"{_SETTING}={setting}: the chat template of {config.model.path} {problem}; {remedy}"], code="no-call-form"
    )


@cache
def _forms() -> dict[str, dict[str, Any]]:
    forms: dict[str, dict[str, Any]] = yaml.safe_load((Path(__file__).parent / "response_forms.yaml").read_text())
    return {name: form for name, form in forms.items() if not name.startswith("_")}


def _load(template: Mapping[str, Any]) -> Any:
    from transformers.utils.chat_parsing.response_templates import load_response_template

    return load_response_template(dict(template))


def _named(setting: str) -> Mapping[str, Any]:
    if setting in _forms():
        return _forms()[setting]
    try:
        template: dict[str, Any] = json.loads(Path(setting).read_text(encoding="utf-8"))
        _load(template)
    except (OSError, ValueError) as error:
        names = ", ".join(["auto", "none", *_forms()])
        remedy = f"give a JSON file with a response template of transformers, or one of {names}"
        raise ConfigError([f"{_SETTING}={setting}: {error}; {remedy}"], code="bad-response-template") from error
    return template


def _as_form(tokenizer: Any, template: Mapping[str, Any]) -> ResponseForm:
    form = ResponseForm(template)
    thought = form._thought
    shown = (
        thought is not None and thought.close_re is not None and thought.close_re.search(str(tokenizer.chat_template))
    )
    return replace(form, shows_thinking=bool(shown))


def _probes(tokenizer: Any) -> Iterator[tuple[str, str, bool]]:
    """Yield a prompt and a turn with a call, as the chat template writes them, and whether arguments were text.

    Some templates write nothing after a call, so the turn comes with and without its last special token.
    """
    if tokenizer.chat_template is None:
        return
    asked = {"role": "user", "content": "go"}
    last = re.compile(rf"(?:{special_token_pattern(tokenizer).pattern})\s*\Z")
    for arguments in (_PROBED, json.dumps(_PROBED)):
        call = {"type": "function", "id": "functions.zap:0", "function": {"name": "zap", "arguments": arguments}}
        said = {"role": "assistant", "content": "", "tool_calls": [call]}
        try:
            prompt, whole = (
                tokenizer.apply_chat_template(messages, tools=[_PROBE], add_generation_prompt=next_, tokenize=False)
                for messages, next_ in (([asked], True), ([asked, said], False))
            )
        except Exception:  # templates are programs of the checkpoint and can raise anything
            continue
        same = next(
            (i for i, (a, b) in enumerate(zip(prompt, whole, strict=False)) if a != b), min(len(prompt), len(whole))
        )
        for text in (last.sub("", whole[same:]), whole[same:]):
            yield prompt[:same], text, isinstance(arguments, str)


def _reads_back(form: ResponseForm, prompt: str, text: str) -> bool:
    calls = replace(form, has_calls=True).message(prompt, text, [_PROBE]).tool_calls
    return [(call.name, call.arguments) for call in calls] == [("zap", _PROBED)]


def _thinking(found: Mapping[str, Any]) -> str:
    return next((found[name] for name in _THOUGHTS if found.get(name)), "")


def _calls(found: Any, tools: Sequence[Tool] | None) -> list[ToolCall]:
    """Check one parsed call. With ``tools``, its arguments are text, to be typed. Raises ``ValueError``."""
    function = found.get("function") if isinstance(found, dict) else None
    if isinstance(function, str):
        return python_calls(function)
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ValueError("not a call")
    arguments = {} if function.get("arguments") is None else function["arguments"]
    if not isinstance(arguments, dict):
        raise ValueError("the arguments are not an object")
    if tools is not None:
        arguments = typed_arguments(function["name"], arguments, tools)
    return [ToolCall(function["name"], json.loads(json.dumps(arguments, ensure_ascii=False).replace(_CUT, "")))]
