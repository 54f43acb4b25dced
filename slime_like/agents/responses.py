"""Thinking and tool calls in a model's text, read in the form in which its chat template writes them.

A form is a response template of transformers. Reading is strict: if any call is cut off or does not parse, the text
stays text. Calls inside thinking are drafts.
"""

import ast
import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import yaml

from slime_like.agents.rendering import ChatFormat, Message, Tool, ToolCall
from slime_like.config.rollout import AgentConfig
from slime_like.errors import ConfigError
from slime_like.models.tokenization import TemplateFault, render_messages, special_token_pattern, without_stop

_SETTING = "rollout.agent.tool_parser"
_THOUGHTS = ("thinking", "reasoning_content", "reasoning")
_MALFORMED = (ValueError, KeyError, TypeError, AttributeError)
_JSON_NAMES = {"true": True, "false": False, "null": None}
_TYPES = {
    str: "string",
    int: "integer",
    float: "number",
    bool: "boolean",
    type(None): "null",
    dict: "object",
    list: "array",
}
_JOINED = {"repeats": True, "join": ""}
_TEXT = {"content": "text", "content_args": {"strip": False}, **_JOINED}
_OPENING_TOKENS = 64
"""Number of tokens at the end of a prompt that decide whether it opens thinking."""

_MARK = re.compile(r"<|\[(?=[A-Z/])")
_CUT = "\ufdd2"
"""Inserted into marks that are text. It is a Unicode noncharacter."""


@dataclass(frozen=True)
class ResponseForm:
    """A form of thinking and tool calls.

    Attributes:
        template: response template of transformers.
        has_calls: whether tool calls are read.
        shows_thinking: whether the chat template knows thinking. If not, it stays in a message's content, because a
            history could not show it otherwise.
        text_arguments: whether the chat template expects the arguments of calls as JSON text.
        needs_stop: whether only a turn with its stop token can be read.
    """

    template: Mapping[str, Any] = field(repr=False)
    tokenizer: Any = field(repr=False)
    has_calls: bool = False
    shows_thinking: bool = True
    text_arguments: bool = False
    needs_stop: bool = False

    def message(self, prompt: str, text: str, tools: Sequence[Tool], stop: str = "") -> Message:
        """Convert a turn to a message. ``prompt`` may open thinking. Without ``tools``, there are no calls.

        ``text`` is the turn without ``stop``, the token that ended it.
        """
        prefix = self._prefix(prompt)
        try:
            content, thinking, calls = self._read(prefix, text + stop * self.needs_stop, tools)
            if calls and not (tools and self.has_calls):
                raise ValueError("calls are text here")
        except (RecursionError, *_MALFORMED):
            found = _parsed(self._bare, prefix, text)
            content, thinking, calls = found.get("content") or "", _thinking(found), []
        if thinking and not (self.shows_thinking or self._is_open(prefix)):
            closes, start = self._thought.close_re, text.find(thinking) + len(thinking)
            end = closes.search(text, start) or closes.search(text)
            content, thinking = (text[: end.end()] + content if calls else text), ""
        return Message("assistant", content.strip() if calls else content, tuple(calls), reasoning=thinking)

    def decode_turns(self, turns: Iterable[tuple[Sequence[int], Sequence[int], Collection[int] | None]]) -> list[str]:
        """Decode turns as reward functions and environments read them, with thinking in ``<think>...</think>``.

        ``turns`` has all tokens before each turn, which may open thinking; the turn's; and the stop tokens to leave out
        at its end (``without_stop``).
        """
        given = [
            (tuple(map(int, before[-_OPENING_TOKENS:])), without_stop(self.tokenizer, tokens, stops))
            for before, tokens, stops in turns
        ]
        shared = list(dict.fromkeys(before for before, _ in given))  # samples of one prompt
        parts = [*map(list, shared), *(tokens for _, tokens in given)]
        texts = self.tokenizer.batch_decode(parts, clean_up_tokenization_spaces=False)
        opened = {before: self._opened(text) for before, text in zip(shared, texts, strict=False)}
        said = zip(given, texts[len(shared) :], strict=True)
        return [self._marked(opened[before] + text) for (before, _), text in said]

    def _opened(self, prompt: str) -> str:
        """Return the part of a turn's thinking, with its mark, that the prompt has already written."""
        if self._thought is None:
            return self._plain._opened(prompt)
        prefix = self._prefix(prompt)
        return prefix if self._is_open(prefix) else ""

    def _marked(self, whole: str) -> str:
        import regex

        if self._thought is None or "<think>" in self._thought.open_re.pattern:
            return whole
        fields, opens, closes = self._loaded.fields, self._thought.open_re.pattern, self._thought.close_re.pattern
        thoughts = regex.compile(rf"{opens}(?P<thought>.*?)(?:(?P<end>{closes})|\Z)", regex.DOTALL)
        said: str = thoughts.sub(
            lambda m: f"<think>{m['thought']}{'</think>' if m['end'] else ''}", self._masked(whole)
        )
        for marks in (fields["header"].open_re, fields["content"].close_re) if "header" in fields else ():
            said = marks.sub("", said)
        return said.replace(_CUT, "")

    @cached_property
    def _loaded(self) -> Any:
        fields = dict(self.template["fields"])
        fields["content"] = {**_JOINED, **fields.get("content", _TEXT)}  # both the text before and after a call
        return _load({**self.template, "fields": fields})

    @cached_property
    def _plain(self) -> "ResponseForm":
        return _as_form(self.tokenizer, _data()["forms"]["thinking"])

    @cached_property
    def _bare(self) -> Any:
        """The form of thinking only. All other text is content, as it stands."""
        thoughts = {name: spec for name, spec in self.template["fields"].items() if name in _THOUGHTS}
        return _load({**self.template, "fields": {**thoughts, "content": _TEXT}})

    @cached_property
    def _thought(self) -> Any:
        found = (self._loaded.fields.get(name) for name in _THOUGHTS)
        return next((spec for spec in found if spec is not None and spec.open_re and spec.close_re), None)

    def _prefix(self, prompt: str) -> str:
        """Return the part of the turn that the prompt has already written."""
        found = [mark.end() for mark in self._loaded.start_anchor_re.finditer(prompt)]
        return prompt[found[-1] :] if found else ""

    def _is_open(self, prefix: str) -> bool:
        """Return whether the turn continues thinking that the prompt has opened."""
        return bool(prefix) and _CUT in _thinking(_parsed(self._bare, prefix, _CUT))

    def _read(self, prefix: str, text: str, tools: Sequence[Tool]) -> tuple[str, str, list[ToolCall]]:
        """Return content, thinking and calls. Raises ``ValueError`` if a call is cut off or does not parse."""
        masked, spec = self._masked(text), self._loaded.fields.get("tool_calls")
        as_text = spec is not None and spec.content in ("xml-inline", "kv-lines")
        found = _parsed(self._loaded, prefix, masked, tools if as_text else ())
        content, thinking = found.get("content") or "", _thinking(found).replace(_CUT, "")
        if self._loaded.implicit is None and text.strip() and not (content or thinking or found.get("tool_calls")):
            raise ValueError("the form has no place for this text")
        given = found.get("tool_calls") or []
        if (thinking or given) and self._thought and self._thought.close_re.search(content):
            *_, end = self._thought.close_re.finditer(masked)  # thinking has no opening mark, or two blocks
            content, _, calls = self._read("", masked[end.end() :], tools)
            thinking = self._thought.open_re.sub("", masked[: end.start()], count=1)
            return content, thinking.replace(_CUT, ""), calls
        content = content.replace(_CUT, "")
        if not given:
            return content, thinking, []
        marks = spec.open_re.search(content, partial=True), spec.close_re.search(content)
        if any(mark is not None and mark.group().strip() for mark in marks):
            raise ValueError("a mark of a call is cut off, or is in an argument")
        given = given if isinstance(given, list) else [given]
        return content, thinking, [call for one in given for call in _calls(one)]

    def _masked(self, text: str) -> str:
        """Insert a cut into quoted marks of thinking and into marks inside the JSON of calls. They end neither."""
        import regex

        if self._thought is not None:
            closes = self._thought.close_re.pattern.removesuffix(r"\s*")
            quoted = rf"(?P<quote>[`\"'])(?:{closes})(?P=quote)"
            text = regex.sub(quoted, lambda found: found[0][:2] + _CUT + found[0][2:], text)
        spec = self._loaded.fields.get("tool_calls")
        if spec is None or spec.content != "json" or spec.content_args.get("string_delims"):
            return text
        said, at = "", 0
        for mark in spec.open_re.finditer(text):
            with suppress(ValueError, RecursionError):
                start, end = mark.end(), json.JSONDecoder().raw_decode(text, mark.end())[1]
                if start >= at:
                    said, at = said + text[at:start] + _MARK.sub(rf"\g<0>{_CUT}", text[start:end]), end
        return said + text[at:]


def response_form(tokenizer: Any, setting: str = "auto") -> ResponseForm:
    """Return the form that reads back a call as the chat template writes it.

    The checkpoint's own ``response_template`` is tried first. If no form fits, only thinking is read. ``setting`` is
    ``auto``; ``none``, to read no calls; the name of a form; or a JSON file with a response template. Raises
    ``ConfigError`` if the setting names no form, or a response template is malformed.
    """
    forms, is_named, probes = _data()["forms"], setting not in ("auto", "none"), list(_probes(tokenizer))
    found = []
    try:
        template = getattr(tokenizer, "response_template", None)
        if is_named:
            template = forms.get(setting) or json.loads(Path(setting).read_text("utf-8"))
        found += [_as_form(tokenizer, template)] if template is not None else []
    except (OSError, *_MALFORMED) as error:  # a checkpoint's malformed template is one that does not fit
        if is_named:
            remedy = f"give a JSON file with a response template, or {', '.join(['auto', 'none', *forms])}"
            raise ConfigError([f"{_SETTING}={setting}: {error}; {remedy}"], code="bad-response-template") from error
    for form in found if is_named else (*found, *(_as_form(tokenizer, template) for template in forms.values())):
        fits = [
            (kept, as_text) for *turn, as_text in probes for kept in (False, True) if _reads_back(form, kept, *turn)
        ]
        if fits or is_named:
            kept, as_text = min(fits, default=(False, False))
            has_calls = setting != "none" and "tool_calls" in form.template["fields"]
            needs_stop = kept and form.template not in forms.values()
            return replace(form, has_calls=has_calls, text_arguments=as_text, needs_stop=needs_stop)
    return _as_form(tokenizer, forms["thinking"])


def require_calls(form: ResponseForm, agent: AgentConfig, model: Path, has_tools: bool) -> None:
    """Raise ``ConfigError`` if the model would be shown tools, but calls in the template's form cannot be read."""
    setting, tokenizer = agent.tool_parser, form.tokenizer
    if setting == "none" or form.has_calls or tokenizer.chat_template is None:
        return
    if has_tools or (agent.is_set and ChatFormat(tokenizer).renders_tools):
        written = [text for _, text, _, _ in _probes(tokenizer) if _data()["call"]["name"] in text]
        problem = f"writes calls as `{written[0]}`, which no known form reads back" if written else "renders no calls"
        remedy = "give a response template (JSON), ship one in tokenizer_config.json, or use none to read no calls"
        said = f"{_SETTING}={setting}: the chat template of {model} {problem}; {remedy}"
        raise ConfigError([said], code="no-call-form")


@cache
def _data() -> dict[str, Any]:
    data: dict[str, Any] = yaml.safe_load((Path(__file__).parent / "response_forms.yaml").read_text("utf-8"))
    return data


def _as_form(tokenizer: Any, template: Mapping[str, Any]) -> ResponseForm:
    form = ResponseForm(template, tokenizer)
    thought = form._thought
    return replace(form, shows_thinking=bool(thought and thought.close_re.search(str(tokenizer.chat_template))))


def _probes(tokenizer: Any) -> Iterator[tuple[str, str, str, bool]]:
    """Yield a prompt, a turn with a call and the token that ends it, with arguments as a mapping and as text."""
    if tokenizer.chat_template is None:
        return
    asked, probe = {"role": "user", "content": "go"}, _data()
    last = re.compile(rf"(?:{special_token_pattern(tokenizer).pattern})\s*\Z")
    for as_text in (False, True):
        call = ToolCall(**probe["call"])
        said = Message("assistant", "", (call,)).for_template(as_text)
        try:
            prompt = render_messages(tokenizer, [asked], [probe["tool"]], prompt=True)
            whole = render_messages(tokenizer, [asked, said], [probe["tool"]])
        except TemplateFault:
            continue
        same = next((at for at, (a, b) in enumerate(zip(prompt, whole, strict=False)) if a != b), len(prompt))
        before, _, mark = prompt[:same].rpartition("<")
        same = same if ">" in mark else len(before)  # not inside a mark that both begin with
        text = last.sub("", whole[same:])
        yield prompt[:same], text, whole[same + len(text) :], as_text


def _reads_back(form: ResponseForm, keeps_stop: bool, prompt: str, text: str, stop: str) -> bool:
    tried, probe = replace(form, has_calls=True), _data()
    reply = tried.message(prompt, text + stop * keeps_stop, [probe["tool"]])
    return reply.tool_calls == (ToolCall(**probe["call"]),)


def _load(template: Mapping[str, Any]) -> Any:
    from transformers.utils.chat_parsing.response_templates import load_response_template

    return load_response_template(dict(template))


def _parsed(loaded: Any, prefix: str, text: str, tools: Sequence[Tool] = ()) -> dict[str, Any]:
    """Parse a turn, whose calls have arguments as text if ``tools`` are given. Raises ``ValueError`` if one is cut
    off."""
    from transformers.utils.chat_parsing import ResponseParser

    parser = ResponseParser(loaded, prefix=prefix, tools=list(map(_typed, tools)))
    parser.feed(text)
    found, last = parser.finalize()
    is_last = ("region_close", "tool_calls") in ((event["type"], event["field"]) for event in last)
    if is_last and not any(end.end() == len(text) for end in loaded.fields["tool_calls"].close_re.finditer(text)):
        raise ValueError("a call is cut off")
    return found


def _typed(tool: Tool) -> dict[str, Any]:
    """Describe a tool by the types of its parameters, to which transformers casts texts. Text that fits none stays."""
    function = tool["function"]
    root = function.get("parameters")
    properties = root.get("properties") if isinstance(root, Mapping) else None
    schemas = properties if isinstance(properties, Mapping) else {}
    types = {key: {"type": _types(schema, root)} for key, schema in schemas.items()}
    return {"function": {"name": function["name"], "parameters": {"properties": types}}}


def _types(schema: Any, root: Any) -> list[str]:
    """Return the types that a JSON schema in ``root`` allows. If it allows strings, only null is another reading."""
    found = _allowed(schema, root)
    if "string" in found:
        found &= {"null"}
    elif "integer" in found:
        found |= {"number"}  # 5.0 is an integer, too
    return [name for name in _TYPES.values() if name in found]


def _allowed(schema: Any, root: Any) -> set[str]:
    if not isinstance(schema, Mapping):
        return set()
    if isinstance(place := schema.get("$ref"), str):
        target = root
        for name in place.removeprefix("#/").split("/"):
            target = target.get(name) if isinstance(target, Mapping) else None
        return _allowed(target, root)
    values = [*_listed(schema, "enum"), *([schema["const"]] if "const" in schema else [])]
    found = {_TYPES.get(type(value), "string") for value in values}
    found |= {kind for kind in _listed(schema, "type") if isinstance(kind, str)}
    found |= {"null"} if schema.get("nullable") is True else set()  # OpenAPI's
    for key in ("anyOf", "oneOf", "allOf"):
        found = found.union(*(_allowed(each, root) for each in _listed(schema, key)))
    return found


def _listed(schema: Mapping[str, Any], key: str) -> list[Any]:
    value = schema.get(key, [])
    return value if isinstance(value, list) else [value]


def _thinking(found: Mapping[str, Any]) -> str:
    return next((found[name] for name in _THOUGHTS if found.get(name)), "")


def _calls(found: Any) -> list[ToolCall]:
    """Check one parsed call. Raises ``ValueError``."""
    function = found["function"]
    if isinstance(function, str):
        return _python_calls(function.replace(_CUT, ""))
    name, arguments = function.get("name"), function.get("arguments")
    arguments = {} if arguments is None else arguments
    if not isinstance(name, str) or not name or not isinstance(arguments, dict):
        raise ValueError("not a call")
    plain = json.dumps(arguments, ensure_ascii=False, allow_nan=False).replace(_CUT, "")
    return [ToolCall(name, json.loads(plain.encode()))]  # rejects half of a surrogate pair


def _python_calls(text: str) -> list[ToolCall]:
    """Parse calls with keyword arguments, ``[f(a=1), g()]``. Raises ``ValueError`` for anything else."""
    try:
        body: Any = _JsonNames().visit(ast.parse(text.strip(), mode="eval")).body
        found = [_dashed(node) for node in body.elts]
        calls = [ToolCall(name, {k.arg: ast.literal_eval(k.value) for k in c.keywords}) for name, c in found]
        json.dumps([call.arguments for call in calls], ensure_ascii=False, allow_nan=False).encode()
    except (SyntaxError, AttributeError, TypeError, RecursionError, MemoryError) as error:
        raise ValueError(f"not a list of calls: {error}") from error
    if not calls or any(one.args or any(k.arg is None for k in one.keywords) for _, one in found):
        raise ValueError("not a list of calls with keyword arguments")
    return calls


def _dashed(node: Any) -> tuple[str, Any]:
    """Return a call's name and the call. Python reads the dashes of a name as subtraction."""
    if not isinstance(node, ast.BinOp) or not isinstance(node.op, ast.Sub):
        return ast.unparse(node.func), node
    name, call = _dashed(node.right)
    return f"{ast.unparse(node.left).replace(' - ', '-')}-{name}", call


class _JsonNames(ast.NodeTransformer):
    """Replaces JSON's constants, which templates write inside objects, by Python's."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(_JSON_NAMES[node.id]) if node.id in _JSON_NAMES else node
