"""Thinking and tool calls in each form: what parses is a call, what does not stays text."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from slime_like.agents.rendering import ChatFormat, Tool
from slime_like.agents.responses import ResponseForm, require_calls, response_form
from slime_like.config.rollout import AgentConfig
from slime_like.errors import ConfigError
from slime_like.examples.tiny_model import byte_tokenizer
from tests.support.rejections import Rejects

SCHEMA = {
    "type": "object",
    "$defs": {"Count": {"type": "integer"}},
    "properties": {
        "k": {"type": "integer"},
        "s": {"type": "string"},
        "ref": {"$ref": "#/$defs/Count"},
        "gone": {"$ref": "#/$defs/Gone"},
        "maybe": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
        "one": {"oneOf": [{"type": "array", "items": {}}, {"type": "null"}]},
        "all": {"allOf": [{"$ref": "#/$defs/Count"}, {"description": "d"}]},
        "listed": {"enum": [1, 2]},
        "fixed": {"const": True},
        "text": {"type": ["string", "null"]},
        "free": {"description": "d"},
    },
}
TOOLS: list[Tool] = [{"type": "function", "function": {"name": "zap", "parameters": SCHEMA}}]
ONE, TWO = ("zap", {"k": 1, "s": "5"}), ("zap", {"k": 2, "s": "x"})


def tokens(text: str) -> str:
    """Spell DeepSeek's tokens."""
    marks = text.replace("<", "<\uff5c").replace(">", "\uff5c>")
    return marks.replace("tool_call_", "tool\u2581call\u2581").replace("tool_sep", "tool\u2581sep")


# The marks of thinking, and a call with {} for its arguments.
JSON_FORMS = {
    "hermes": ("<think>", "</think>", '<tool_call>\n{"name": "zap", "arguments": {}}\n</tool_call>'),
    "llama": ("<think>", "</think>", '{"name": "zap", "parameters": {}}'),
    "deepseek_v3": (
        "<think>", "</think>", tokens("<tool_call_begin>function<tool_sep>zap\n```json\n{}\n```<tool_call_end>"),
    ),
    "deepseek_v31": ("<think>", "</think>", tokens("<tool_call_begin>zap<tool_sep>{}<tool_call_end>")),
    "kimi": (
        "<think>", "</think>", "<|tool_call_begin|>functions.zap:0<|tool_call_argument_begin|>{}<|tool_call_end|>",
    ),
    "mistral": ("[THINK]", "[/THINK]", "[TOOL_CALLS]zap[ARGS]{}"),
    "harmony": (
        "<|channel|>analysis<|message|>", "<|end|><|start|>assistant",
        "<|channel|>commentary to=functions.zap <|constrain|>json<|message|>{}",
    ),
}  # fmt: skip
OTHER_FORMS = {
    "qwen3_coder": (
        "<think>", "</think>", "<tool_call>\n<function=zap>\n{}</function>\n</tool_call>",
        "<parameter={}>\n{}\n</parameter>\n",
    ),
    "glm": (
        "<think>", "</think>", "<tool_call>zap\n{}</tool_call>", "<arg_key>{}</arg_key>\n<arg_value>{}</arg_value>\n",
    ),
    "muse": (
        " to=self<|message|>", "<|eom|><|start|>assistant",
        ' to=zap<|message|><atem:function_calls>\n<atem:invoke name="zap">\n{}</atem:invoke>\n</atem:function_calls>',
        '<atem:parameter name="{}">{}</atem:parameter>\n',
    ),
    "gemma4": ("<|channel>thought\n", "<channel|>", "<|tool_call>call:zap{{{}}}<tool_call|>", "{}:{},"),
    "lfm": ("<think>", "</think>", "<|tool_call_start|>[zap({})]<|tool_call_end|>", "{}={}, "),
}  # fmt: skip
FORMS = {**JSON_FORMS, **OTHER_FORMS}
WRITTEN = {"gemma4": '<|"|>{}<|"|>', "lfm": "{!r}"}
SEVERAL = sorted(FORMS.keys() - {"llama", "harmony"})


def call(form: str, arguments: dict[str, Any]) -> str:
    if form in JSON_FORMS:
        return JSON_FORMS[form][2].replace("{}", json.dumps(arguments))
    _, _, whole, each = OTHER_FORMS[form]
    text = WRITTEN.get(form, "{}")
    parts = (each.format(k, text.format(v) if isinstance(v, str) else json.dumps(v)) for k, v in arguments.items())
    return whole.format("".join(parts).removesuffix("," if form == "gemma4" else ", "))


def tokenizer(template: str) -> Any:
    made = byte_tokenizer()
    made.chat_template = template
    return made


@cache
def form_of(name: str) -> ResponseForm:
    return response_form(tokenizer(FORMS[name][1].split("<|start|>")[0]), name)


def read(name: str, text: str, prompt: str = "", tools: list[Tool] = TOOLS) -> tuple[str, str, list[Any]]:
    reply = form_of(name).message(prompt, text, tools)
    return reply.content, reply.reasoning, [(one.name, one.arguments) for one in reply.tool_calls]


def judged(name: str, prompt: str, text: str) -> str:
    """Return the turn as rewards read it, without line breaks."""
    form = form_of(name)
    before, turn = (form.tokenizer.encode(part, add_special_tokens=False) for part in (prompt, text))
    return form.decode_turns([(before, turn, ())])[0].replace("\n", "")


@pytest.mark.parametrize("name", FORMS)
def test_a_call_is_read_with_the_thinking_before_it(name: str) -> None:
    opened, closed, *_ = FORMS[name]
    assert read(name, call(name, ONE[1])) == ("", "", [ONE])
    assert read(name, f"{opened}why{closed}{call(name, ONE[1])}") == ("", "why", [ONE])
    assert read(name, f"why{closed}{call(name, ONE[1])}", prompt=f"question{opened}") == ("", "why", [ONE])


@pytest.mark.parametrize("name", SEVERAL)
def test_several_calls_count_only_if_the_last_is_whole(name: str) -> None:
    first, second = call(name, ONE[1]), call(name, TWO[1])
    between = "<|eom|><|start|>assistant" if name == "muse" else "\n"
    whole = first + between + second
    if name != "mistral":  # a call ends where the next begins
        assert read(name, whole)[2] == [ONE, TWO]
    cut = whole[: len(first) + len(between) + len(second) // 2]
    assert read(name, cut) == (cut, "", [])


@pytest.mark.parametrize("name", FORMS)
def test_a_call_that_is_cut_off_stays_text(name: str) -> None:
    text = call(name, ONE[1])
    for end in range(1, len(text) - 2):
        assert read(name, text[:end])[2] in ([], [ONE])
    half = text[: text.rindex("5")]
    assert read(name, half) == (half, "", [])


@pytest.mark.parametrize("name", sorted(FORMS.keys() - {"harmony", "muse"}))
def test_a_call_inside_thinking_is_a_draft(name: str) -> None:
    opened, closed, *_ = FORMS[name]
    draft = f"perhaps {call(name, TWO[1])} no"
    assert read(name, f"{opened}{draft}{closed}done") == ("done", draft, [])
    assert read(name, f"{opened}{draft}") == ("", draft, [])
    assert read(name, draft, prompt=f"question{opened}\n") == ("", draft, [])
    assert read(name, f"{opened}{draft}{closed}{call(name, ONE[1])}") == ("", draft, [ONE])
    assert read(name, f"x {opened}{draft}")[1] == ""  # thinking opens a turn


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("mark", ["</tool_call>", "</think>", "<tool_call|>", "[TOOL_CALLS]", "</parameter>", '"\n\\'])
def test_a_mark_inside_an_argument_is_text(name: str, mark: str) -> None:
    if (name, mark) == ("gemma4", "<tool_call|>"):
        mark = "x<tool_call|>"
    wanted = ("zap", {"s": f"a {mark} b"})
    assert read(name, call(name, wanted[1])) == ("", "", [wanted])


@pytest.mark.parametrize("name", ["qwen3_coder", "glm", "muse"])
@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("k", "7", 7), ("k", "seven", "seven"), ("k", "1e999", "1e999"), ("s", "7", "7"), ("s", "null", "null"),
        ("ref", "7", 7), ("gone", "7", "7"), ("maybe", "7", 7), ("maybe", "null", None), ("one", "[1]", [1]),
        ("all", "7", 7), ("all", "x", "x"), ("listed", "2", 2), ("listed", "a", "a"), ("fixed", "True", True),
        ("text", "12", "12"), ("text", "true", "true"),
        ("text", "null", None), ("free", "7", "7"), ("unknown", "7", "7"), ("s", "a\n\nb", "a\n\nb"),
        ("k", "5.0", 5.0), ("s", "a\r\nb", "a\r\nb"),
    ],
)  # fmt: skip
def test_arguments_written_as_text_get_the_type_of_the_schema(name: str, key: str, text: str, value: Any) -> None:
    ((_, arguments),) = read(name, call(name, {key: text}))[2]
    assert arguments == {key: value} and type(arguments[key]) is type(value)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", '<tool_call>{"name": "zap", "arguments": []}</tool_call>'),
        ("hermes", '<tool_call>{"name": 1}</tool_call>'),
        ("hermes", '<tool_call>{"name": ""}</tool_call>'),
        ("hermes", f"<tool_call>{'[' * 9999}</tool_call>"),
        ("hermes", "<tool_call>x</tool_call>" + call("hermes", ONE[1])),
        ("hermes", call("qwen3_coder", ONE[1])),
        ("qwen3_coder", "<tool_call><function=zap><parameter=k>1</function></tool_call>"),
        ("qwen3_coder", "<tool_call><function=zap><parameter=k>1<parameter=s>x</parameter></function></tool_call>"),
        ("glm", "<tool_call>zap\n<arg_key>k</arg_key><arg_key>s</arg_key><arg_value>1</arg_value></tool_call>"),
        ("hermes", '<tool_call>{"name": "zap", "arguments": {"s": "\\ud83d"}}</tool_call>'),
        ("lfm", "<|tool_call_start|>[zap(s='\\ud83d')]<|tool_call_end|>"),
        ("lfm", "<|tool_call_start|>[a + zap(k=1)]<|tool_call_end|>"),
        ("lfm", "<|tool_call_start|>[zap(k=1, s=)]<|tool_call_end|>"),
        ("lfm", "<|tool_call_start|>[zap(1)]<|tool_call_end|>"),
        ("lfm", "<|tool_call_start|>[zap(k=open('x'))]<|tool_call_end|>"),
    ],
)
def test_a_broken_call_stays_text(name: str, text: str) -> None:
    assert read(name, text) == (text, "", [])


def test_text_around_calls_is_content() -> None:
    assert read("hermes", f"Let me.\n{call('hermes', ONE[1])}\nDone.")[0] == "Let me.\n\nDone."
    assert read("hermes", '<tool_call>{"name": "zap"}</tool_call>') == ("", "", [("zap", {})])
    assert read("hermes", " no call ") == (" no call ", "", [])
    assert read("hermes", call("hermes", ONE[1]), tools=[])[0] == call("hermes", ONE[1])
    python = "<|tool_call_start|>[zap(s={'a': true}), zap()]<|tool_call_end|>"
    assert read("lfm", python)[2] == [("zap", {"s": {"a": True}}), ("zap", {})]
    dashed = "<|tool_call_start|>[a.b-c-d(k=1), e(s='<|tool_call_end|>')]<|tool_call_end|>"
    assert read("lfm", dashed)[2] == [("a.b-c-d", {"k": 1}), ("e", {"s": "<|tool_call_end|>"})]
    windows = call("qwen3_coder", ONE[1]).replace("\n", "\r\n")
    assert read("qwen3_coder", windows) == ("", "", [ONE])


def test_thinking_that_no_mark_opens_holds_no_calls() -> None:
    draft, said = f"perhaps {call('hermes', TWO[1])}", call("hermes", ONE[1])
    assert read("hermes", f"{draft}</think>{said}") == ("", draft, [ONE])
    assert read("hermes", f"{draft}</think>done")[2] == []
    twice = f"<think>a</think><think>{draft}</think>"
    assert read("hermes", twice + said) == ("", f"a</think><think>{draft}", [ONE])
    assert read("hermes", f"{twice}done") == ("done", f"a</think><think>{draft}", [])
    assert read("hermes", "x</think>done") == ("x</think>done", "", [])


@pytest.mark.parametrize("name", sorted(FORMS.keys() - {"harmony", "muse"}))
def test_a_quoted_mark_does_not_end_thinking(name: str) -> None:
    opened, closed, *_ = FORMS[name]
    draft = f"`{closed}` ends it {call(name, TWO[1])}"
    assert read(name, f"{opened}{draft}") == ("", draft, [])
    assert read(name, f"{opened}{draft}{closed}done") == ("done", draft, [])
    assert read(name, f"{opened}a{closed}`{closed}` ends it") == (f"`{closed}` ends it", "a", [])
    assert read(name, f'{opened}"yes"{closed}\n"no"') == ('"no"', '"yes"', [])
    assert judged(name, "p", f"{opened}`{closed}` 5{closed}42") == f"<think>`{closed}` 5</think>42"
    quoting = ("zap", {"s": f'"{closed}"'})
    assert read(name, f"{opened}a{closed}{call(name, quoting[1])}") == ("", "a", [quoting])


def test_thinking_stays_in_the_content_if_the_template_shows_none() -> None:
    form = response_form(tokenizer("{{ messages }}"), "hermes")
    said = f"<think>perhaps {call('hermes', TWO[1])}</think>"
    assert form.message("", f"{said}done", TOOLS).content == f"{said}done"
    reply = form.message("", said + call("hermes", ONE[1]), TOOLS)
    assert (reply.content, len(reply.tool_calls)) == (said, 1)
    reply = form.message("", said + said + call("hermes", ONE[1]), TOOLS)
    assert (reply.content, len(reply.tool_calls)) == (said + said, 1)


@pytest.mark.parametrize("name", FORMS)
def test_rewards_read_thinking_between_the_same_marks(name: str) -> None:
    opened, closed, *_ = FORMS[name]
    final = {"harmony": "<|channel|>final<|message|>42", "muse": " to=user<|message|>42"}.get(name, "42")
    assert judged(name, "p", f"{opened}5?{closed}{final}") == "<think>5?</think>42"
    assert judged(name, f"p{opened}", f"5?{closed}{final}") == "<think>5?</think>42"
    assert (judged(name, "p", f"{opened}5?"), judged(name, "p", final)) == ("<think>5?", "42")


@pytest.mark.parametrize("said", ["", "I look at it", "I listen to"])
@pytest.mark.parametrize("written", ["", "json", "code", "<|constrain|>json"])
@pytest.mark.parametrize("channel", ["commentary", "analysis", "final"])
def test_a_call_on_any_channel_is_a_call(channel: str, written: str, said: str) -> None:
    """gpt-oss writes calls on the channel of its thinking, too. No mark stays in the text in front of the call."""
    thought = "<|channel|>analysis<|message|>a<|end|><|start|>assistant"
    spoken = f"<|channel|>commentary<|message|>{said}<|end|><|start|>assistant" if said else ""
    name = f" to=functions.zap{channel}"  # the name of the tool ends with a channel's
    tool = [{"type": "function", "function": {"name": f"zap{channel}", "parameters": SCHEMA}}]
    for header in (f"<|channel|>{channel}{name}", f"{name}<|channel|>{channel}"):
        text = f'{thought}{spoken}{header}{written and " "}{written}<|message|>{{"k": 1}}'
        reply = form_of("harmony").message("", text, tool)
        assert [(call.name, call.arguments) for call in reply.tool_calls] == [(f"zap{channel}", {"k": 1})], text
        assert (reply.content, reply.reasoning) == (said, "a")


def test_text_that_ends_like_a_recipient_keeps_its_call() -> None:
    spoken = f" to=user<|message|>I listen to<|eom|><|start|>assistant{call('muse', ONE[1])}"
    assert read("muse", spoken) == ("I listen to", "", [ONE])


HISTORY = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content or '' }}{% for c in m.tool_calls or [] %}"
    "{% set f = c.function %}"
)
NEXT = "{% endfor %}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
TEMPLATES = {
    "hermes": "<tool_call>{{ f | tojson }}</tool_call>",
    "qwen3_coder": "<tool_call><function={{ f.name }}>{% for k, v in f.arguments.items() %}<parameter={{ k }}>"
    "{{ v }}</parameter>{% endfor %}</function></tool_call>",
    "kimi": "<|tool_call_begin|>{{ c.id }}<|tool_call_argument_begin|>{{ f.arguments | tojson }}<|tool_call_end|>",
    "deepseek_v31": tokens("<tool_call_begin>{{ f.name }}<tool_sep>{{ f.arguments + '' }}<tool_call_end>"),
    "mistral": "[TOOL_CALLS]{{ f.name }}[ARGS]{{ f.arguments | tojson }}{{ eos_token }}",
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_form_is_the_one_that_reads_back_the_template(name: str) -> None:
    made = tokenizer("{{ tools }}" + HISTORY + TEMPLATES[name] + NEXT)
    form = response_form(made)
    assert form.template == form_of(name).template and form.has_calls
    assert form.text_arguments == (name == "deepseek_v31")
    assert not response_form(made, "none").has_calls


def test_the_checkpoints_own_form_comes_first_if_it_fits(tmp_path: Path, rejects: Rejects) -> None:
    own = {**form_of("hermes").template, "defaults": {"role": "assistant"}}
    made = tokenizer("{{ tools }}" + HISTORY + TEMPLATES["hermes"] + NEXT)
    made.response_template = own
    assert response_form(made).template == own
    made.chat_template = "{{ tools }}" + HISTORY + TEMPLATES["kimi"] + NEXT
    assert response_form(made).template == form_of("kimi").template
    file = tmp_path / "form.json"
    file.write_text(json.dumps(own))
    assert response_form(made, str(file)).template == own
    file.write_text('{"fields": {}}')
    for setting in (str(file), "unknown"):
        with rejects(ConfigError, "bad-response-template"):
            response_form(made, setting)


def test_a_checkpoints_form_may_need_the_stop_token() -> None:
    made = tokenizer("{{ tools }}" + HISTORY + "CALL {{ f | tojson }}<eos>" + NEXT)
    made.response_template = {
        "start_anchor": "<assistant>",
        "fields": {
            "tool_calls": {
                "open": "CALL ", "close": "<eos>", "content": "json", "repeats": True,
                "transform": {"function": "{content}"},
            },
            "content": {"content": "text", "close": "<eos>"},
        },
    }  # fmt: skip
    form, said = response_form(made), 'CALL {"name": "zap", "arguments": {"k": 1, "s": "5"}}'
    assert form.template == made.response_template and form.has_calls
    reply = form.message("<assistant>", f"so {said}", TOOLS, stop="<eos>")
    assert (reply.content, [(one.name, one.arguments) for one in reply.tool_calls]) == ("so", [ONE])
    assert form.message("<assistant>", f"so {said}", TOOLS).content == f"so {said}"
    assert form.message("<assistant>", "done", TOOLS, stop="<eos>").content == "done"


@pytest.mark.parametrize("called", ["CALL {{ f.name }}", ""])
def test_agents_need_a_form_that_reads_calls(called: str, rejects: Rejects) -> None:
    def require(form: ResponseForm, has_tools: bool, **agent: Any) -> None:
        require_calls(form, AgentConfig(**agent), Path("m"), has_tools)

    made = tokenizer("{{ tools }}" + HISTORY + called + NEXT)
    with rejects(ConfigError, "no-call-form"):
        require(response_form(made), has_tools=False, name="a:b")
    with rejects(ConfigError, "no-call-form"):
        require(response_form(made), has_tools=True)
    require(response_form(made), has_tools=False)
    require(response_form(made, "none"), has_tools=True, name="a:b", tool_parser="none")
    require(response_form(made, "kimi"), has_tools=True, name="a:b", tool_parser="kimi")
    assert AgentConfig(name="a:b", tool_parser="x.json").tool_parser == str(Path("x.json").absolute())
    made.chat_template = HISTORY + called + NEXT  # shows no tools
    require(response_form(made), has_tools=False, name="a:b")


@pytest.mark.parametrize(
    ("text", "judged"),
    [
        ("<think>5</think>42<eos>", "<think>5</think>42"),
        ("<think>5</think><eos>", "<think>5</think>"),
        ("<think>5</think>", "<think>5</think>"),  # a mark that is a special token, at which a stop string ends
        ("a , b .<stop>", "a , b ."),
        ("a<stop>b<pad><pad>", "a<stop>b"),
        ("5 x", "5 x"),  # a stop token that is text
    ],
)
def test_only_stop_tokens_and_padding_are_left_out(text: str, judged: str) -> None:
    made = tokenizer("{{ messages }}")
    made.add_special_tokens({"additional_special_tokens": ["<think>", "</think>", "<stop>"]})
    made.clean_up_tokenization_spaces = True
    ids = made.encode(text, add_special_tokens=False)
    form = response_form(made)
    stops = made.encode("<stop>x", add_special_tokens=False)
    assert ChatFormat(made).turn_text([1], ids, stops) == judged
    opened = [made.encode(said, add_special_tokens=False) for said in ("3+4?<think>", "5</think>42")]
    assert form.decode_turns([([1], ids, stops), (*opened, stops)]) == [judged, "<think>5</think>42"]
    assert form.decode_turns([(*opened, None), ([1], made.encode("a<stop><think>"), None)])[1] == "a<stop>"
