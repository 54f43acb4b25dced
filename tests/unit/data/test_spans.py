"""Spans of a conversation that carry loss, and rejection of templates and rows."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slime_like.config import DataConfig
from slime_like.config.reading.load import load_config
from slime_like.data.chat_template import SpanFault
from slime_like.data.prompts import PromptSource
from slime_like.data.spans import ConversationEncoder
from slime_like.data.token_rows import TokenBudget
from slime_like.errors import DataError
from slime_like.examples.tiny_model import byte_tokenizer
from slime_like.observability.timing import PhaseClock
from slime_like.orchestration.run.stored_sources import Demonstrations
from tests.support import templates
from tests.support.properties import examples
from tests.support.rejections import Rejects
from tests.support.templates import END, tokenizer_of
from tests.unit.data.test_prompts import write_rows

CONFIG = DataConfig(messages_key="messages", max_prompt_tokens=200, shuffle=False)
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


def said(role: str, content: str, **others: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **others}


def calls(*names: str) -> list[dict[str, Any]]:
    return [
        {"id": "abcdefghi", "type": "function", "function": {"name": name, "arguments": {"a": 1}}} for name in names
    ]


PLAIN = [said("system", "Add."), said("user", "1+1="), said("assistant", " 2\n"), said("user", "é"),
         said("assistant", "日本"), said("user", "bye")]  # fmt: skip
AGENT = [said("user", "1+1="), said("assistant", "", tool_calls=calls("add", "sub")), said("tool", "2"),
         said("tool", "0"), said("assistant", "<think>\nso\n</think>\n\n2")]  # fmt: skip
TWO = [said("user", "a"), said("assistant", "b"), said("user", "c"), said("assistant", "d")]
THOUGHT = [said("user", "a"), said("assistant", "<think>\nq\n</think>\n\nb"), said("user", "c"), said("assistant", "d")]


tokenizer_with = cache(tokenizer_of)


@cache
def encoder(template: str, stop: str = END) -> ConversationEncoder:
    return ConversationEncoder(tokenizer_with(template), [tokenizer_with(template).convert_tokens_to_ids(stop)])


def spans_of(
    template: str, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None, stop: str = END
) -> list[str]:
    """The spans of all rows. Each is preceded by the prompt that the model gets for this turn."""
    tokenizer, found = tokenizer_with(template), list[str]()
    turns = iter(index for index, message in enumerate(messages) if message["role"] == "assistant")
    for tokens, spans in encoder(template, stop).encode(messages, tools):
        for start, end in spans:
            asked = tokenizer.apply_chat_template(
                messages[: next(turns)], tools=tools, tokenize=False, add_generation_prompt=True
            )
            assert tokens[:start] == tokenizer.encode(asked, add_special_tokens=False)
            found.append(tokenizer.decode(tokens[start:end]))
        assert end == len(tokens)
    assert not list(turns)
    return found


_CALL = '<tool_call>{"name": "%s", "arguments": {"a": 1}}</tool_call>'
JSON = '{"a": 1}'
CONTENT = "{{ message.content }}"
CALLED = _CALL % "add" + _CALL % "sub" + END
ANSWERS: dict[str, tuple[str, list[dict[str, Any]], list[str]]] = {
    "white space": (templates.SOUND, PLAIN, [f" 2\n{END}", f"日本{END}"]),
    "tools": (templates.SOUND, AGENT, [CALLED, f"<think>\nso\n</think>\n\n2{END}"]),
    "markers": (templates.MARKED, PLAIN, [f" 2\n{END}", f"日本{END}"]),
    "turns end before markers": (templates.MARKED_TO_THE_NEXT, TWO, [f"b{END}", f"d{END}"]),
    "merged observations": (templates.MERGES_TOOLS, AGENT, [CALLED, f"<think>\nso\n</think>\n\n2{END}"]),
    "stripped": (templates.STRIPS, PLAIN, [f"2{END}", f"日本{END}"]),
    "nothing dropped": (templates.DROPS_THINKING, AGENT, [CALLED, f"<think>\nso\n</think>\n\n2{END}"]),
    "opened by the prompt": (templates.THINKS_FIRST, THOUGHT[:2], [f"q\n</think>\n\nb{END}"]),
    "default system": (templates.DEFAULT_SYSTEM, TWO, [f"b{END}", f"d{END}"]),
    "thinking dropped later": (templates.DROPS_THINKING, THOUGHT, [f"<think>\nq\n</think>\n\nb{END}", f"d{END}"]),
    "closed by the turn": (templates.THINKS_FIRST, TWO, [f"\n</think>\n\nb{END}", f"\n</think>\n\nd{END}"]),
    "closed by the template": (templates.CLOSES_THINKING, TWO, [f"</think>b{END}", f"</think>d{END}"]),
    "closed by the prompt": (templates.NEVER_THINKS, TWO, [f"b{END}", f"d{END}"]),
    "an empty block": (templates.EMPTY_BLOCKS, TWO, [f"</think>b{END}", f"</think>d{END}"]),
    "no thinking": (templates.of_vllm("minicpmv45"), TWO, [f"b{END}", f"d{END}"]),
    "ended by what follows": (templates.of_vllm("chatml"), TWO, [f"b{END}", f"d{END}"]),
    "the last ends twice": (templates.LAST_ENDS_TWICE, TWO, [f"b{END}", f"d{END}"]),
}


@pytest.mark.parametrize("name", ANSWERS)
def test_spans_contain_the_assistants_text_and_end_of_turn(name: str) -> None:
    template, messages, expected = ANSWERS[name]
    assert spans_of(template, messages) == expected


def test_a_header_may_end_a_turn() -> None:
    """Also the last turn, which a question would follow."""
    assert spans_of(templates.NO_END_BUT_HEADERS, TWO, stop="<|im_start|>") == ["b<|im_start|>", "d<|im_start|>"]


@pytest.mark.parametrize(
    ("template", "messages", "turns"),
    [(templates.DROPS_THINKING, THOUGHT, [1, 1]), (templates.THINKS_FIRST, TWO, [1, 1]), (templates.SOUND, TWO, [2])],
)
def test_a_new_row_begins_where_the_template_changes_earlier_text(
    template: str, messages: list[dict[str, Any]], turns: list[int]
) -> None:
    assert [len(spans) for _, spans in encoder(template).encode(messages)] == turns


def test_thinking_and_arguments_are_given_as_the_template_reads_them(rejects: Rejects) -> None:
    thought = [said("user", "a"), said("assistant", "b", reasoning_content="q")]
    for key in ("reasoning_content", "thinking"):
        [(tokens, [span])] = encoder(templates.chatml(content=f"{{{{ message.{key} }}}}{CONTENT}")).encode(thought)
        assert tokenizer_with(templates.SOUND).decode(tokens[slice(*span)]) == f"qb{END}"
    with rejects(SpanFault, "message-dropped"):
        encoder(templates.SOUND).encode(thought)
    # A template that shows no thinking, but whose prompt begins it.
    assert spans_of(templates.THINKS_FIRST, thought) == [f"q\n</think>\n\nb{END}"]
    assert spans_of(templates.CLOSES_THINKING, thought) == [f"q</think>b{END}"]
    called = templates.SOUND.replace("call.function | tojson", "call.function.name + call.function.arguments")
    assert spans_of(called, AGENT[:2])[0] == f"<tool_call>add{JSON}</tool_call><tool_call>sub{JSON}</tool_call>{END}"


TEXTS = st.text(st.sampled_from(list("ab é日\n\t😀{}\"'<|>")), max_size=8)


@examples(40)
@given(exchanges=st.lists(st.tuples(TEXTS, TEXTS.filter(str.strip), st.booleans()), min_size=1, max_size=4))
def test_spans_agree_with_transformers(exchanges: list[tuple[str, str, bool]]) -> None:
    """Masks are equal with generation markers around the turns, and without markers."""
    messages = []
    for asked, answered, observed in exchanges:
        messages += [said("user", asked), said("assistant", answered)]
        messages += [said("tool", asked), said("assistant", answered)] * observed
    reference = tokenizer_with(templates.MARKED).apply_chat_template(
        messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    for template in (templates.MARKED, templates.SOUND):
        [(tokens, spans)] = encoder(template).encode(messages)
        mask = [int(any(start <= place < end for start, end in spans)) for place in range(len(tokens))]
        ended = reference["input_ids"][len(tokens) :]
        assert (tokens + ended, mask + [0] * len(ended)) == (reference["input_ids"], reference["assistant_masks"])
        assert tokenizer_with(template).decode(ended) == "\n"


FAULTS: list[tuple[str, str, list[dict[str, Any]]]] = [
    ("generation-prompt", templates.COUNTS, TWO),
    ("generation-prompt", templates.NEVER_THINKS, THOUGHT),
    ("generation-prompt", templates.chatml(generation="<|im_start|>assistant: "), TWO),
    ("no-generation-prompt", templates.NO_PROMPT, TWO),
    ("no-end-of-turn", templates.NO_END, TWO),
    ("text-after-end", templates.chatml(end="<|im_end|>.{{ '' }}"), TWO),
    ("message-dropped", templates.IGNORES_TOOLS, AGENT),
    # The names occur in the user's text, the arguments nowhere.
    ("message-dropped", templates.IGNORES_TOOLS, [said("user", "call add or sub with a = 1"), AGENT[1]]),
    ("message-dropped", templates.NAMES_CALLS, [said("user", "1+1="), AGENT[1]]),
    ("message-dropped", templates.SOUND, [*TWO[:3], said("assistant", "", function_call={"name": "add"})]),
    ("tools-not-rendered", templates.IGNORES_TOOLS, [*TWO, said("tool", "x"), said("assistant", "y")]),
    ("message-dropped", templates.chatml(content="{{ message.content[:1] }}"), THOUGHT),
    ("marks-differ", templates.MARKED_TOO_SHORT, TWO),
    ("template-failed", templates.chatml(head="{{ raise_exception('no') }}"), TWO),
    ("template-failed", templates.SOUND, TWO[1:]),
    ("no-prompt", templates.BARE, [said("user", ""), said("assistant", "b")]),
]  # fmt: skip


@pytest.mark.parametrize(("code", "template", "messages"), FAULTS, ids=[f"{i}-{f[0]}" for i, f in enumerate(FAULTS)])
def test_spans_that_cannot_be_found_exactly_are_rejected(
    rejects: Rejects, code: str, template: str, messages: list[dict[str, Any]]
) -> None:
    with rejects(SpanFault, code):
        encoder(template).encode(messages)


@pytest.mark.parametrize("trims", [False, True])
@pytest.mark.parametrize(
    ("header", "merges", "content", "splits"),
    [
        ("<|im_start|>assistant\n", [("Ċ", "Ċ")], "\n\nb", True),
        ("<|im_start|>assistant\n", [("Ċ", "Ċ")], "b", False),
        ("<|im_start|>assistant: ", [("Ġ", "b")], "b", True),
        ("<|im_start|>assistant:", [("Ġ", "b")], " b", False),
    ],
)
def test_a_token_on_both_sides_of_a_border_is_rejected(
    rejects: Rejects, header: str, merges: list[tuple[str, str]], content: str, splits: bool, trims: bool
) -> None:
    """Also if the tokenizer trims white space off its offsets, so the token seems to begin after the border."""
    template = (
        "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% else %}" + header
        + "{{ m.content }}<|im_end|>{% endif %}{% endfor %}{% if add_generation_prompt %}" + header + "{% endif %}"
    )  # fmt: skip
    merging = tokenizer_of(template, merges=merges, trims=trims)
    messages = [said("user", "a"), said("assistant", content)]
    if not splits:
        [(tokens, spans)] = ConversationEncoder(merging).encode(messages)
        assert merging.decode(tokens[slice(*spans[0])]) == content + END
        return
    with rejects(SpanFault, "split-token"):
        ConversationEncoder(merging).encode(messages)


def test_a_tokenizer_without_offsets_template_or_stop_token_is_rejected(rejects: Rejects) -> None:
    class Slow:
        chat_template, eos_token_id, backend_tokenizer = templates.SOUND, 0, None

        def convert_ids_to_tokens(self, ids: list[int]) -> list[str]:
            return list(map(str, ids))

    without_eos = tokenizer_of(templates.SOUND)
    without_eos.eos_token = None
    faulty: list[tuple[Any, str]] = [
        (Slow(), "no-offsets"), (tokenizer_of(None), "no-chat-template"), (without_eos, "no-eos"),
    ]  # fmt: skip
    for tokenizer, code in faulty:
        with rejects(SpanFault, code):
            ConversationEncoder(tokenizer).encode(TWO)
    stop = without_eos.convert_tokens_to_ids(END)
    [(_, spans)] = ConversationEncoder(without_eos, [stop]).encode(TWO)
    assert len(spans) == 2


# ------------------------------------------------------------------------------------------------------------- rows
def source_of(path: Path, rows: list[dict[str, Any]], **others: Any) -> PromptSource:
    tokenizer = others.pop("tokenizer", tokenizer_of(templates.SOUND))
    config = CONFIG.model_copy(update=others.pop("changes", {}))
    return PromptSource([write_rows(path, rows)], tokenizer, config, seed=0, need_responses=True, **others)


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_a_row_becomes_a_demonstration_whose_answers_carry_loss(tmp_path: Path, suffix: str) -> None:
    """With arguments and tools as JSON text, keys without a value, and text after the last answer."""
    written = {"id": "abcdefghi", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    messages = [
        said("user", "1+1=", tool_calls=None),
        said("assistant", None, tool_calls=[written]),  # type: ignore[arg-type]
        said("tool", "2", tool_calls=[]),
        said("assistant", "2"),
        said("user", "bye"),
    ]
    rows = [{"messages": messages, "tools": json.dumps([TOOL]), "answer": "2"}]
    [prompt] = source_of(tmp_path / f"rows{suffix}", rows).next(1)
    tokenizer = tokenizer_of(templates.SOUND)
    plain = [said("user", "1+1="), said("assistant", "", tool_calls=calls("add")), said("tool", "2"),
             said("assistant", "2")]  # fmt: skip
    whole = tokenizer.apply_chat_template(plain, tools=[TOOL], tokenize=False)
    assert tokenizer.decode([*prompt.input.token_ids, *(prompt.response_tokens or ())]) == whole.removesuffix("\n")
    assert tokenizer.decode(list(prompt.input.token_ids)).endswith("1+1=<|im_end|>\n<|im_start|>assistant\n")
    carrying = [tokenizer.decode(list(prompt.response_tokens or ())[start:end]) for start, end in prompt.spans or ()]
    assert carrying == [_CALL % "add" + END, f"2{END}"]
    assert prompt.answer == "2"


def test_a_demonstration_has_the_mask_of_its_spans(tmp_path: Path) -> None:
    source = source_of(tmp_path / "rows.jsonl", [{"messages": TWO}], tokenizer=byte_tokenizer())
    [trajectory] = Demonstrations(source, 1).next_batch(1, PhaseClock())
    decoded = byte_tokenizer().decode
    assert decoded(trajectory.prompt_tokens) == "<user>a<assistant>"
    assert decoded(trajectory.response_tokens) == "b<eos><user>c<assistant>d<eos>"
    assert trajectory.loss_mask.tolist() == [True, True, False, False, False, True, True]
    assert trajectory.loss_mask.dtype == torch.bool and trajectory.sampled_len == 4
    assert trajectory.prompt_len == 3 and trajectory.response_len == 7


SWITCHES: list[tuple[dict[str, Any], list[str]]] = [
    ({"weight": 0.0}, ["d"]), ({"loss_mask": 0}, ["d"]), ({"step_loss_mask": 0}, ["d"]), ({"loss": False}, ["d"]),
    ({"train": False, "trainable": 0}, ["d"]), ({"weight": 1, "train": True}, ["b", "d"]), ({"loss": None}, ["b", "d"]),
]  # fmt: skip


@pytest.mark.parametrize(("switch", "trained"), SWITCHES, ids=str)
def test_a_message_may_carry_no_loss(tmp_path: Path, switch: dict[str, Any], trained: list[str]) -> None:
    rows = [{"messages": [TWO[0], {**TWO[1], **switch}, {**TWO[2], "weight": 0}, TWO[3]]}]
    [prompt] = source_of(tmp_path / "rows.jsonl", rows).next(1)
    tokens, response = tokenizer_of(templates.SOUND), list(prompt.response_tokens or ())
    assert [tokens.decode(response[start:end]) for start, end in prompt.spans or ()] == [f"{t}{END}" for t in trained]
    assert f"b{END}" in tokens.decode([*prompt.input.token_ids, *response])


def test_a_conversation_may_become_several_rows(tmp_path: Path) -> None:
    """Each has the tokens that the model would get, and they are one rollout."""
    tokenizer = tokenizer_of(templates.DROPS_THINKING)
    lengths = list[int]()
    source = source_of(tmp_path / "rows.jsonl", [{"messages": THOUGHT}], tokenizer=tokenizer, excess=lengths.append)
    first, second = Demonstrations(source, 1).next_batch(1, PhaseClock())
    for row, (end, answer) in zip(
        (first, second), ((1, f"<think>\nq\n</think>\n\nb{END}"), (3, f"d{END}")), strict=True
    ):
        asked = tokenizer.apply_chat_template(THOUGHT[:end], add_generation_prompt=True, return_dict=False)
        assert (row.prompt_tokens.tolist(), tokenizer.decode(row.response_tokens)) == (asked, answer)
        assert row.loss_mask.all() and (row.group_id, row.rollout_id) == (0, "0-0")
    assert [row.sequence_id for row in (first, second)] == ["0-0.0", "0-0.1"]
    assert lengths == [max(first.total_len, second.total_len)]


NO_MAPPING = {"function": {"name": "add", "arguments": "x"}}
BAD_ROWS: list[tuple[str, dict[str, Any]]] = [
    ("no-conversation", {"prompt": "a", "response": "b"}),
    ("bad-messages", {"messages": "a"}),
    ("bad-messages", {"messages": []}),
    ("bad-messages", {"messages": ["a"]}),
    ("bad-messages", {"messages": [{"role": "user"}]}),
    ("bad-messages", {"messages": [said("user", "a"), said("assistent", "b"), said("assistant", "c")]}),
    ("bad-messages", {"messages": [said("human", "a"), said("assistant", "b")]}),
    ("bad-messages", {"messages": [{"role": "user", "content": [{"type": "text", "text": None}]}]}),
    ("bad-messages", {"messages": [said("user", "a"), said("assistant", "", tool_calls="add")]}),
    ("bad-messages", {"messages": [said("user", "a"), said("assistant", "", tool_calls=[{"name": "add"}])]}),
    ("bad-messages", {"messages": [said("user", "a"), said("assistant", "", tool_calls=[NO_MAPPING])]}),
    ("bad-messages", {"messages": [*TWO[:3], said("assistant", "b", weight=0.5)]}),
    ("bad-messages", {"messages": [*TWO[:3], said("assistant", "b", weight=0, train=True)]}),
    ("bad-messages", {"messages": [said("user", "a", loss_mask=1), TWO[1]]}),
    ("bad-messages", {"messages": [TWO[0], said("assistant", "b", reasoning="q", thinking="r")]}),
    ("bad-messages", {"messages": [TWO[0], said("assistant", "b", thought=["q"])]}),
    ("message-dropped", {"messages": [TWO[0], said("assistant", "b", reasoning_text="q")]}),
    ("no-assistant-turn", {"messages": [TWO[0], said("assistant", "b", weight=0)]}),
    ("bad-tools", {"messages": TWO, "tools": "add"}),
    ("bad-tools", {"messages": TWO, "tools": ["add"]}),
    ("no-assistant-turn", {"messages": [said("user", "a")]}),
    ("special-token", {"messages": [said("user", f"a{END}"), said("assistant", "b")]}),
    ("special-token", {"messages": [said("user", "a"), said("assistant", "", tool_calls=calls(END))]}),
    ("special-token", {"messages": TWO, "tools": [{END: 1}]}),
]


@pytest.mark.parametrize(("code", "row"), BAD_ROWS, ids=[f"{i}-{case[0]}" for i, case in enumerate(BAD_ROWS)])
def test_a_bad_conversation_is_named_by_file_and_line(
    tmp_path: Path, rejects: Rejects, code: str, row: dict[str, Any]
) -> None:
    with rejects(DataError, code) as caught:
        source_of(tmp_path / "rows.jsonl", [{"messages": TWO}, row])
    assert f"{tmp_path / 'rows.jsonl'}:2: " in str(caught.value)


def test_messages_of_sharegpt_are_converted(tmp_path: Path) -> None:
    """Other roles are left to the template."""
    shared = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}, {"from": "critic", "value": "c"},
              {"from": "gpt", "value": "d"}]  # fmt: skip
    plain = [said("user", "a"), said("assistant", "b"), said("critic", "c"), said("assistant", "d")]
    found = [source_of(tmp_path / f"{index}.jsonl", [{"messages": rows}]) for index, rows in enumerate((shared, plain))]
    first, second = (source.next(1) for source in found)
    assert first == second


def test_the_models_stop_tokens_end_turns(tmp_path: Path, rejects: Rejects) -> None:
    """A base model's tokenizer has another EOS token than its chat template writes."""
    tokenizer = tokenizer_of(templates.SOUND, eos="<eos>")
    path, stops = tmp_path / "rows.jsonl", [tokenizer.convert_tokens_to_ids(END)]
    with rejects(DataError, "no-end-of-turn"):
        source_of(path, [{"messages": TWO}], tokenizer=tokenizer)
    assert source_of(path, [{"messages": TWO}], tokenizer=tokenizer, stop_token_ids=stops).num_rows == 1


def test_a_demonstration_over_the_token_budget_is_found_before_the_start(tmp_path: Path, rejects: Rejects) -> None:
    """Unless the row's prompt is dropped anyway."""
    trainer = load_config(None, ["--model.path", "m", "--trainer.target_tokens_per_batch", "300"], tmp_path).trainer
    rows = [{"messages": TWO}, {"messages": [said("user", "a"), said("assistant", "b" * 300)]}]
    with rejects(DataError, "over-token-budget"):
        source_of(tmp_path / "rows.jsonl", rows, excess=TokenBudget(trainer).excess)
    rows[1]["messages"][0]["content"] = "a" * 300
    source = source_of(tmp_path / "rows.jsonl", rows, excess=TokenBudget(trainer).excess)
    assert (source.num_rows, source.dropped_prompts) == (1, 1)
