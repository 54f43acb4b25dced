"""Rows as datasets spell them: tools, nulls of tables, text parts, written messages, answers of any form."""

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from tokenizers.processors import TemplateProcessing

from slime_like.checks.names import first_row
from slime_like.config import DataConfig, RunConfig
from slime_like.config.rollout import RewardConfig, RewardFunction
from slime_like.data.encoding import EncodedRow, RowEncoder, answer_text
from slime_like.data.prompts import PromptSource
from slime_like.data.rows import Row, read_rows
from slime_like.errors import DataError
from slime_like.examples.tiny_model import byte_tokenizer
from slime_like.interfaces.user_code import Task
from slime_like.models.tokenization import with_template_variables
from slime_like.sandbox.observations import ObservationEncoder
from slime_like.sandbox.rewards.registry import required_of_rows
from tests.support.rejections import Rejects

TOOLS = "{% if tools %}[{{ tools | tojson }}]{% endif %}"
TURNS = """{% for m in messages %}<{{ m.role }}>{{ m.content }}{% if m.tool_calls is defined %}
{%- for c in m.tool_calls %}({{ c.function.name }} {{ c.function.arguments | tojson }}){% endfor %}{% endif %}
{%- if m.role == "assistant" %}<eos>{% endif %}{% endfor %}"""
PROMPT = "{% if add_generation_prompt %}<assistant>{% endif %}"
ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
HELLO = [{"role": "user", "content": "go"}]


def tokenizer_of(template: Any) -> Any:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


def encoded(row: dict[str, Any], template: str = TOOLS + TURNS + PROMPT, supervised: bool = False, **data: Any) -> str:
    config = DataConfig(**data)
    found = RowEncoder(tokenizer_of(template), config, supervised).encode(Row(Path("rows.jsonl"), 1, row))
    return text(found)


def text(found: EncodedRow) -> str:
    return str(byte_tokenizer().decode([*found.input.token_ids, *(found.response_tokens or ())]))


@pytest.mark.parametrize("tools", [[ADD], json.dumps([ADD])])
@pytest.mark.parametrize("prompt", ["go", HELLO])
def test_tools_of_a_prompt_reach_the_template(prompt: Any, tools: Any) -> None:
    shown = f"[{json.dumps([ADD])}]"
    assert encoded({"prompt": prompt, "tools": tools}) == f"{shown}<user>go<assistant>"
    row = {"prompt": prompt, "tools": tools, "response": "x"}
    assert encoded(row, supervised=True) == f"{shown}<user>go<assistant>x<eos>"
    assert encoded({"prompt": prompt, "tools": []}) == "<user>go<assistant>"


@pytest.mark.parametrize(
    ("row", "template", "data", "code"),
    [
        ({"tools": [ADD]}, TURNS + PROMPT, {}, "tools-not-rendered"),
        ({"tools": [ADD]}, TOOLS + TURNS + PROMPT, {"apply_chat_template": False}, "tools-not-rendered"),
        ({"tools": "add"}, TOOLS + TURNS + PROMPT, {}, "bad-tools"),
        ({"tools": [{"x": "<eos>"}]}, TOOLS + TURNS + PROMPT, {}, "special-token"),
    ],
)
def test_tools_that_would_not_be_shown_are_refused(
    rejects: Rejects, row: dict[str, Any], template: str, data: dict[str, Any], code: str
) -> None:
    with rejects(DataError, code):
        encoded({"prompt": "go", **row}, template, **data)


@pytest.mark.parametrize("read", ["reasoning_content", "reasoning", "thinking"])
@pytest.mark.parametrize("written", ["reasoning_content", "thought"])
def test_thinking_and_calls_of_a_prompt_are_shown_as_the_template_reads_them(read: str, written: str) -> None:
    """Under any key, and with arguments as JSON text if the template takes only text."""
    as_text = TURNS.replace("c.function.arguments | tojson", "c.function.arguments + ''")
    turn = {"role": "assistant", "content": "so", written: "hm", "reasoning": None, "tool_calls": [CALL]}
    row = {"prompt": [*HELLO, turn, {"role": "tool", "content": "2"}]}
    shown = encoded(row, as_text.replace("{{ m.content }}", f"{{{{ m.{read} }}}}|{{{{ m.content }}}}") + PROMPT)
    assert shown == '<user>|go<assistant>hm|so(add {"a": 1})<eos><tool>|2<assistant>'


THOUGHT: dict[str, Any] = {"role": "assistant", "content": "so", "thinking": "hm"}
WITHOUT_ARGUMENTS = TURNS.replace("{{ c.function.arguments", "{{ 1")
SILENT = "{% for m in messages if m.role != 'tool' %}" + TURNS.partition("%}")[2]


@pytest.mark.parametrize(
    ("turns", "template", "code"),
    [
        ([THOUGHT], TURNS, "message-dropped"),
        ([THOUGHT | {"reasoning": "other"}], TURNS, "bad-prompt"),
        ([THOUGHT | {"thinking": ["hm"]}], TURNS, "bad-prompt"),
        ([{"role": "assistant", "tool_calls": [CALL]}], WITHOUT_ARGUMENTS, "message-dropped"),
        ([{"role": "assistant", "content": "so"}, {"role": "tool", "content": "2"}], SILENT, "tools-not-rendered"),
    ],
)  # fmt: skip
def test_parts_of_a_prompt_that_are_never_shown_are_refused(
    rejects: Rejects, turns: list[dict[str, Any]], template: str, code: str
) -> None:
    with rejects(DataError, code):
        encoded({"prompt": [*HELLO, *turns, *HELLO]}, template + PROMPT)


def test_a_template_may_leave_out_the_thinking_of_earlier_turns() -> None:
    last = "{% if loop.last and m.reasoning_content %}{{ m.reasoning_content }}|{% endif %}{{ m.content }}"
    assert encoded({"prompt": [*HELLO, THOUGHT, *HELLO]}, TURNS.replace("{{ m.content }}", last) + PROMPT) == (
        "<user>go<assistant>so<eos><user>go<assistant>"
    )


def test_the_length_filter_counts_tools(tmp_path: Path) -> None:
    path, tokenizer = tmp_path / "rows.jsonl", tokenizer_of(TOOLS + TURNS + PROMPT)
    path.write_text("".join(json.dumps({"prompt": "go", **more}) + "\n" for more in ({}, {"tools": [ADD]})))
    length = len(tokenizer.encode(f"[{json.dumps([ADD])}]<user>go<assistant>"))
    for limit, dropped in ((length, 0), (length - 1, 1)):
        source = PromptSource([path], tokenizer, DataConfig(max_prompt_tokens=limit), seed=0)
        assert (source.num_rows, source.dropped_prompts, source.has_tools) == (2 - dropped, dropped, not dropped)


def of_table(path: Path, *rows: dict[str, Any]) -> Row:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(rows)), path)
    return next(iter(read_rows(path)))


def test_keys_of_other_rows_of_a_table_are_left_out(tmp_path: Path) -> None:
    """At every depth of messages and tools. Nulls of a list, of JSON text and of JSON lines are the row's own."""

    def row(key: str, schema: dict[str, Any]) -> dict[str, Any]:
        function = {"name": key, "parameters": {"type": "object", "properties": {key: schema}}}
        call = {"type": "function", "function": {"name": key, "arguments": {key: 1}}}
        messages = [
            *HELLO,
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "content": "2"},
        ]
        return {"prompt": messages, "tools": [{"type": "function", "function": function}]}

    first = row("a", {"enum": [None, "x"]})
    encoder = RowEncoder(tokenizer_of(TOOLS + TURNS + PROMPT), DataConfig(), False)
    plain = text(encoder.encode(Row(tmp_path, 1, first)))
    assert text(encoder.encode(of_table(tmp_path / "a.parquet", first, row("b", {"type": "string"})))) == plain
    assert plain.count("null") == 1 and '(a {"a": 1})' in plain
    own = {"prompt": HELLO, "tools": [{"default": None, "function": {"name": "f"}}]}
    assert '"default": null' in encoded(own)
    written = own | {"tools": json.dumps(own["tools"])}
    assert '"default": null' in text(encoder.encode(of_table(tmp_path / "b.parquet", written)))


def test_nulls_of_a_prompt_s_messages_are_absent() -> None:
    """A template that tests ``tool_calls is defined`` would loop over nothing."""
    row = {"prompt": [{"role": "user", "content": "go", "tool_calls": None, "name": None}]}
    assert encoded(row) == "<user>go<assistant>"
    kept = RowEncoder(byte_tokenizer(), DataConfig(), False, keep_messages=True).encode(Row(Path("a"), 1, row))
    assert json.loads(kept.messages or "") == HELLO


def test_agents_get_arguments_as_their_protocol_spells_them() -> None:
    row = {
        "prompt": [
            *HELLO,
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "content": ""},
        ]
    }
    encoder = RowEncoder(tokenizer_of(TURNS + PROMPT), DataConfig(), False, keep_messages=True)
    [_, call, _] = json.loads(encoder.encode(Row(Path("a"), 1, row)).messages or "")
    assert call["content"] == "" and call["tool_calls"][0]["function"]["arguments"] == '{"a": 1}'


PARTS = [{"type": "text", "text": "go"}, {"type": "text", "text": "on"}]


def test_text_parts_are_joined_and_others_refused_by_name(rejects: Rejects) -> None:
    said = [{"role": "user", "content": PARTS}]
    assert encoded({"prompt": said}) == "<user>go\non<assistant>"
    talk = [*said, {"role": "assistant", "content": PARTS[:1]}]
    row = {"messages": talk}
    assert encoded(row, supervised=True, messages_key="messages") == "<user>go\non<assistant>go<eos>"
    for data, code in (({}, "bad-prompt"), ({"messages_key": "prompt"}, "bad-messages")):
        image = [{"role": "user", "content": [*PARTS, {"type": "image_url", "image_url": {}}]}]
        with rejects(DataError, code) as caught:
            encoded({"prompt": image}, supervised=bool(data), **data)
        assert "'image_url'" in str(caught.value)
    with rejects(DataError, "not-text"):
        encoded({"prompt": "go", "images": ["a.png"]})
    assert encoded({"prompt": "go", "images": []}) == "<user>go<assistant>"


@pytest.mark.parametrize("given", [HELLO, [{"from": "human", "value": "go"}]])
def test_a_prompt_that_is_the_json_of_messages_is_read(given: list[dict[str, Any]]) -> None:
    assert encoded({"prompt": json.dumps(given)}) == "<user>go<assistant>"
    assert encoded({"prompt": f" {json.dumps(given, indent=1)}\n"}) == "<user>go<assistant>"


@pytest.mark.parametrize(
    "given",
    [
        str(HELLO),
        str(HELLO).replace("}", "}\n"),
        json.dumps(HELLO[0]),
        json.dumps(HELLO).replace("go", "\\ud800"),
        json.dumps(HELLO)[:-2] + ", ]",
        json.dumps(HELLO)[:-2],
    ],
)
def test_messages_written_otherwise_are_refused(rejects: Rejects, given: str) -> None:
    with rejects(DataError, "bad-prompt"):
        encoded({"prompt": given})


@pytest.mark.parametrize("given", ["[1, 2]", '[{"role": "admin"}]', "a [b]", "['role']"])
def test_other_text_in_brackets_is_asked(given: str) -> None:
    assert encoded({"prompt": given}) == f"<user>{given}<assistant>"


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("Rome", "Rome"), (2, "2"), (0.5, "0.5"), (True, "true"), (None, ""), (["Rome"], '["Rome"]'),
        (["Rome", 2, True], '["Rome", "2", "true"]'), ({"target": ["é"]}, '{"target": ["é"]}'),
        ([[1], None], "[[1], null]"),
    ],
)  # fmt: skip
def test_an_answer_is_text_or_json(answer: Any, expected: str) -> None:
    assert answer_text(answer) == expected


def required(*names: str) -> dict[str, Any]:
    functions = tuple(RewardFunction(name=name) for name in names)
    return required_of_rows(RewardConfig.model_construct(functions=functions), has_agent=False)


@pytest.mark.parametrize(
    ("names", "need_answer"),
    [
        (("judge",), False), (("format", "length", "majority", "http"), False), (("judge", "exact_match"), True),
        (("environment",), True), (("not_there:f",), True),
    ],
)  # fmt: skip
def test_answers_are_needed_if_a_function_may_read_them(names: tuple[str, ...], need_answer: bool) -> None:
    assert required(*names)["need_answer"] is need_answer


@pytest.mark.parametrize(
    ("source", "kept"),
    [
        ("def f(prompt, response, answer, *, scale=1): row = 1", False),
        ("def f(prompt, response, answer, row): ...", True),
        ("def f(prompt, response, answer, *, row): ...", True),
        ("from other import f", True),
        ("def f(prompt", True),
    ],
)
def test_rows_are_kept_if_a_function_may_ask_for_them(tmp_path: Path, source: str, kept: bool) -> None:
    path = tmp_path / "rewards.py"
    path.write_text(f"raise SystemExit\n{source}")
    assert required(f"{path}:f")["keep_row"] is kept


def test_a_kept_row_is_the_file_s(tmp_path: Path) -> None:
    """In a published form, too. Values that JSON lacks are text."""
    row = {"question": "1+1?", "answer": "So.\n#### 2", "level": 3}
    encoder = RowEncoder(byte_tokenizer(), DataConfig(format="gsm8k"), False, keep_row=True)
    found = encoder.encode(Row(tmp_path, 1, row | {"raw": b"a"}))
    assert json.loads(found.whole_row or "") == row | {"raw": "b'a'"} and found.answer == "2"
    assert (
        RowEncoder(byte_tokenizer(), DataConfig(format="gsm8k"), False).encode(Row(tmp_path, 1, row)).whole_row is None
    )


THINKING = "{% if not enable_thinking | default(true) %}<think></think>{% endif %}"


def test_variables_reach_every_rendering() -> None:
    template = TURNS + "{% if add_generation_prompt %}<assistant>" + THINKING + "{% endif %}"
    off = {"chat_template_kwargs": {"enable_thinking": False}}
    assert encoded({"prompt": "go"}, template, **off) == "<user>go<assistant><think></think>"
    assert encoded({"prompt": "go"}, template) == "<user>go<assistant>"
    answer = "<assistant>" + THINKING + "{% generation %}{{ m.content }}<eos>{% endgeneration %}"
    turn = "{% if m.role == 'user' %}<user>{{ m.content }}{% else %}" + answer + "{% endif %}"
    marked = "{% for m in messages %}" + turn + "{% endfor %}"
    row = {"messages": [*HELLO, {"role": "assistant", "content": "2"}]}
    whole = marked + "{% if add_generation_prompt %}<assistant>" + THINKING + "{% endif %}"
    shown = encoded(row, whole, supervised=True, messages_key="messages", **off)
    assert shown == "<user>go<assistant><think></think>2<eos>"
    tokenizer = with_template_variables(tokenizer_of(template), {"enable_thinking": False})
    observed, _ = ObservationEncoder(tokenizer, None, 99).encode("5", tokenizer.eos_token_id)
    assert tokenizer.decode(observed).endswith("<tool>5<assistant><think></think>")


READING = "{%- if not a is defined %}{% set a = 1 %}{% endif %}{% generation %}{{ b }}{% endgeneration %}{{ range(c) }}"


@pytest.mark.parametrize("template", [READING, {"default": "{{ a }}", "tool_use": "{{ b + c }}"}])
def test_a_variable_that_no_template_reads_is_rejected(template: Any, rejects: Rejects) -> None:
    read = {"a": 1, "b": 2, "c": 3}
    RowEncoder(tokenizer_of(template), DataConfig(chat_template_kwargs=read), False)
    with rejects(DataError, "unread-variable") as caught:
        RowEncoder(tokenizer_of(template), DataConfig(chat_template_kwargs=read | {"A": 1}), False)
    assert "data.chat_template_kwargs.A: " in str(caught.value)


@pytest.mark.parametrize("single", ["<bos> $A", "<eos> $A <eos>", "<bos> <user> $A", "$A <eos>", "$A"])
@pytest.mark.parametrize("prompt", ["Hi", "<bos>Hi", "<bos><user>Hi", "<bos><bos>Hi", "H<bos>i", "Hi<eos>"])
def test_a_prompt_begins_once_with_what_the_tokenizer_adds_and_ends_as_written(prompt: str, single: str) -> None:
    tokenizer = byte_tokenizer()
    ids = {name: tokenizer.convert_tokens_to_ids(name) for name in ("<bos>", "<user>", "<eos>")}
    front = single.split(" $A")[0].replace(" ", "") if not single.startswith("$A") else ""
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single=single, special_tokens=list(ids.items()))
    encoder = RowEncoder(tokenizer, DataConfig(apply_chat_template=False, allow_special_tokens=True), False)
    found = encoder.encode(Row(Path("a"), 1, {"prompt": prompt})).input.token_ids
    expected = prompt if prompt.startswith(front) else front + prompt
    assert list(found) == byte_tokenizer().encode(expected, add_special_tokens=False)
    tokenizer.chat_template = "<bos>" + TURNS + PROMPT  # a template writes its own
    found = RowEncoder(tokenizer, DataConfig(), False).encode(Row(Path("a"), 1, {"prompt": "Hi"})).input.token_ids
    assert tokenizer.decode(list(found)) == "<bos><user>Hi<assistant>"


ENDS = {"<tool>": "<tool>", "<system>\n": "<system>", "<tool><eos>": "<tool>", " <eos>": " <eos>", "": "<user>"}


@pytest.mark.parametrize("written", ENDS)
def test_a_response_ends_like_a_turn_of_a_conversation(written: str) -> None:
    """The turns end with another token than EOS, with white space around it, or with the next message's header."""
    template = TURNS.replace("<eos>", written) + PROMPT
    tokenizer = tokenizer_of(template)
    stops = [tokenizer.convert_tokens_to_ids(name) for name in ("<eos>", "<tool>", "<system>", "<user>")]

    def whole(config: DataConfig, **row: Any) -> str:
        return text(RowEncoder(tokenizer, config, True, stops).encode(Row(Path("a"), 1, row)))

    turns = whole(DataConfig(messages_key="messages"), messages=[*HELLO, {"role": "assistant", "content": "4"}])
    assert whole(DataConfig(), prompt="go", response="4") == turns == f"<user>go<assistant>4{ENDS[written]}"
    plain = DataConfig(apply_chat_template=False)
    assert whole(plain, prompt="go", response="4").removeprefix("<bos>") == "go4<eos>"


def test_a_response_needs_an_end_that_the_model_stops_at(rejects: Rejects) -> None:
    template = TURNS.replace("<eos>", "<tool>") + PROMPT
    for supervised in (True, False):
        with rejects(DataError, "no-end-of-turn") if supervised else nullcontext():
            encoded({"prompt": "go", "response": "4"}, template, supervised=supervised)


@pytest.mark.parametrize("prompt", ["go", HELLO, json.dumps(HELLO), [{"role": "user", "content": [PARTS[0]]}]])
def test_custom_code_is_tried_with_the_first_row(tmp_path: Path, prompt: Any) -> None:
    path, row = tmp_path / "rows.jsonl", {"prompt": prompt, "answer": [2], "level": 3}
    path.write_text(json.dumps({"prompt": "no answer"}) + "\n" + json.dumps(row))
    config = RunConfig.model_validate({"run_dir": "run", "model": {"path": "model"}, "data": {"train": [path]}})
    task, whole = first_row(config) or (None, "")
    assert task == Task("go", '["2"]') and json.loads(whole) == row
