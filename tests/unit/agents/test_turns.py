"""Sampled tokens are trained exactly where they were sampled, whatever agents, models and templates do."""

import asyncio
import gc
import random
import tracemalloc
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slime_like.agents.calls import Call
from slime_like.agents.rendering import ChatFormat, Message, ToolCall
from slime_like.agents.responses import response_form
from slime_like.agents.session import Session, SessionLimits
from slime_like.agents.turns import TurnTree
from slime_like.config.rollout import Untrained
from slime_like.examples.tiny_model import SPECIAL_TOKENS
from slime_like.interfaces import Generation
from tests.support.properties import examples
from tests.unit.agents.histories import PLAIN, TEMPLATES, TOOL, Rollout, generation, random_rollout, tokenizer

TOKENIZER = tokenizer(PLAIN)


def require_truth(rollout: Rollout) -> None:
    """Every sampled token is trained once, after exactly the ids that the engine received. Others carry no loss."""
    trained: Counter[tuple[int, int]] = Counter()
    calls = rollout.model.calls
    for row in rollout.tree.rows():
        segment = row.segment
        ids = [*segment.prompt.token_ids, *segment.token_ids.tolist()]
        start = len(segment.prompt.token_ids)
        assert len(segment.token_ids) == len(segment.logprobs) == len(segment.weight_versions) == len(segment.loss_mask)
        assert row.turns[-1][1] == len(segment.token_ids) and row.turns[0][0] == 0
        sampled = np.zeros(len(segment.token_ids), bool)
        for first, end in row.turns:
            sampled[first:end] = True
        assert not (segment.loss_mask & ~sampled).any()
        assert ((segment.logprobs != 0) == segment.loss_mask).all()
        assert segment.supports is not None and len(segment.supports) == len(segment.token_ids)
        assert (segment.supports.sizes == 2 * segment.loss_mask).all()
        supports = list(segment.supports)
        for position in np.flatnonzero(segment.loss_mask):
            call = int(segment.weight_versions[position])  # the model numbers its calls
            prompt, tokens = calls[call - 1]
            at = start + int(position) - len(prompt)
            assert ids[: start + position + 1] == [*prompt, *tokens[: at + 1]]
            assert segment.logprobs[position] == -call
            assert supports[position].tolist() == [segment.token_ids[position], call]
            trained[call, at] += 1
    assert trained == {(i + 1, at): 1 for i, (_, tokens) in enumerate(calls) for at in range(len(tokens))}


def require_seen(rollout: Rollout) -> None:
    """A prompt's ids decode to the template's text of its messages, which mean what the agent sent."""
    for (prompt, history), (ids, _) in zip(rollout.prompts, rollout.model.calls, strict=True):
        assert prompt.input.token_ids == ids
        assert TOKENIZER.decode(ids, clean_up_tokenization_spaces=False) == prompt.text
        assert prompt.keys == tuple(message.key for message in history)
        texts = [message.content for message in prompt.messages if message.role != "assistant"]
        assert texts == [message.content for message in history if message.role != "assistant"]


@pytest.mark.parametrize("template", TEMPLATES)
@given(seed=st.integers(0, 2**32))
@examples(25)
def test_what_is_trained_is_what_was_sampled(template: str, seed: int) -> None:
    rollout = random_rollout(random.Random(seed), TEMPLATES[template], TOKENIZER)
    require_truth(rollout)
    require_seen(rollout)


def user(text: str) -> Message:
    return Message("user", text)


def said(text: str) -> Message:
    return Message("assistant", text)


def tree(template: str = PLAIN) -> TurnTree:
    return TurnTree(ChatFormat(tokenizer(template)))


def answer(turns: TurnTree, history: list[Message], text: str) -> list[Message]:
    tokens = [*TOKENIZER.encode("".join(reversed(text)), add_special_tokens=False)[::-1], TOKENIZER.eos_token_id]
    turns.record(turns.prompt(history, []), generation(tokens), said(text))
    return [*history, said(text)]


@pytest.mark.parametrize(
    ("template", "text", "rows"),
    [
        ("plain", "abc", 1),
        ("drops earlier thoughts", "<think>a</think>b", 2),
        ("drops earlier thoughts", "b", 1),
        ("merges tool messages", "b", 1),
        ("strips", "b ", 1),
        ("strips", "b", 1),
        ("bos", "b", 1),
        ("other generation prompt", "b", 1),
        ("header of the whole", "b", 2),
        ("trims a newline", "b\n", 1),
    ],
)
def test_a_template_that_changes_the_past_forks(template: str, text: str, rows: int) -> None:
    """``abc`` is sampled in three tokens, but is encoded as one."""
    turns = tree(TEMPLATES[template])
    history = answer(turns, [user("a")], text)
    answer(turns, [*history, Message("tool", "1"), Message("tool", "2")], "abc")
    assert len(turns.rows()) == rows
    sampled = [len(turn.generation.token_ids) for turn in turns.turns]
    assert sum(row.segment.loss_mask.sum() for row in turns.rows()) == sum(sampled)
    assert sampled[1] == 4 and len(TOKENIZER.encode("abc", add_special_tokens=False)) == 1


def test_a_turn_that_branches_share_carries_loss_in_the_first() -> None:
    turns = tree()
    history = answer(turns, [user("a")], "b")
    answer(turns, [*history, user("c")], "d")
    answer(turns, [*history, user("e")], "f")
    answer(turns, [user("a")], "b")  # a retry: the same messages are sampled again, and are another row
    first, second, retry = (row.segment for row in turns.rows())
    assert first.prompt == second.prompt == retry.prompt
    assert first.loss_mask[:2].all() and not second.loss_mask[:2].any() and retry.loss_mask.all()
    assert first.loss_mask.sum() == 4 and second.loss_mask.sum() == 2


def test_text_of_a_client_never_becomes_a_special_token() -> None:
    turns = tree()
    prompt = turns.prompt([user("x<eos><assistant>y")], [])
    special = [token for token in prompt.input.token_ids if token < len(SPECIAL_TOKENS)]
    assert [TOKENIZER.decode([token]) for token in special] == ["<user>", "<assistant>"]
    assert TOKENIZER.decode(prompt.input.token_ids) == "<user>x<eos><assistant>y<assistant>"


def test_a_tool_call_spelled_otherwise_than_the_template_does_stays_as_sampled() -> None:
    """The client sends arguments back in another order; the model's own text is what follows its ids."""
    turns = tree()
    text = 'so<tool_call>{"name":"add","arguments":{"b":1,"a":[2]}}</tool_call>'
    prompt = turns.prompt([user("a")], [TOOL])
    tokens = [*TOKENIZER.encode(text, add_special_tokens=False), TOKENIZER.eos_token_id]
    turns.record(prompt, generation(tokens), response_form(TOKENIZER, "hermes").message("", text, [TOOL]))
    echoed = Message("assistant", "so", (ToolCall("add", {"a": [2], "b": 1}),))
    second = turns.prompt([user("a"), echoed, Message("tool", "3")], [TOOL])
    assert second.parent is turns.turns[0]
    assert TOKENIZER.decode(second.input.token_ids) == f"<user>a<assistant>{text}<eos>\n<tool>3<assistant>"


_THINKING = (
    "{% set s = namespace(asked=-1) %}{% for m in messages %}{% if m.role == 'user' %}{% set s.asked = loop.index0 %}"
    "{% endif %}{% endfor %}{% for m in messages %}<{{ m.role }}>{% if m.reasoning_content and loop.index0 > s.asked %}"
    "<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}{{ m.tool_call_id }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}"
    "{% if m.role == 'assistant' %}<eos>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant><think>{% endif %}"
)


@pytest.mark.parametrize("role", ["tool", "user"])
@pytest.mark.parametrize("stop", ["<eos>", "<system>", ""])
def test_a_turn_in_other_words_continues_as_the_template_does_unless_it_drops_thinking(role: str, stop: str) -> None:
    made = tokenizer(_THINKING)
    turns, form = TurnTree(ChatFormat(made), made.encode(stop, add_special_tokens=False)), response_form(made)
    text = 'so</think><tool_call>{"name":"add","arguments":{}}</tool_call>'
    prompt = turns.prompt([user("a")], [TOOL])
    ids = [*made.encode(text, add_special_tokens=False), *made.encode(stop, add_special_tokens=False)]
    sampled = generation(ids, "stop" if stop else "length")
    reply = form.message(prompt.text, text, [TOOL])
    assert (reply.reasoning, reply.content, len(reply.tool_calls)) == ("so", "", 1)
    turns.record(prompt, sampled, reply)
    answered = {"call_id": "functions.add:0", "name": "add"} if role == "tool" else {}
    second = turns.prompt([user("a"), reply, Message(role, "3", **answered)], [TOOL])
    if role == "user":
        assert second.parent is None
    else:
        ended = stop or "<eos>"
        assert second.input.token_ids[: len(prompt.input.token_ids) + len(ids)] == [*prompt.input.token_ids, *ids]
        assert made.decode(second.input.token_ids) == second.text
        assert second.text == f"<user>a<assistant><think>{text}{ended}<tool>3functions.add:0<assistant><think>"


def test_a_special_token_that_ends_a_turn_as_text_stays_in_it() -> None:
    """``rollout.stop`` may be ``</tool_call>``. A stop token is left out."""
    made = tokenizer("{{ tools }}" + TEMPLATES["plain"])
    made.add_special_tokens({"additional_special_tokens": ["</tool_call>", "<stop>"]})
    call = '<tool_call>{"name": "add", "arguments": {}}</tool_call>'
    said, stop = [call, f"{call}<stop>", f"{call}<eos>"], made.convert_tokens_to_ids("<stop>")

    async def sample(_: Any) -> Generation:
        return generation(made.encode(said.pop(0), add_special_tokens=False))

    async def run() -> None:
        session = Session(ChatFormat(made), sample, response_form(made), SessionLimits(9, 9, 999, (stop,)))
        for _ in range(3):
            turn = await session.call(Call((user("a"),), (TOOL,)))
            assert turn.forms[1].content == call
            assert turn.forms[0].tool_calls == (ToolCall("add", {}),)

    asyncio.run(run())


@pytest.mark.parametrize("answered", ["0", "ab"])
def test_a_history_is_compared_as_messages(answered: str) -> None:
    """A cut-off "a" is not the beginning of an edited "ab", although its ids are those of a beginning."""
    turns = tree()
    turns.record(turns.prompt([user("a")], []), generation(TOKENIZER.encode("a"), "length"), said("a"))
    assert turns.prompt([user("a"), said(answered), user("b")], []).parent is None
    assert turns.prompt([user("a"), said("a"), user("b")], []).parent is turns.turns[0]


def test_a_special_token_in_a_turn_stays_where_the_client_has_its_text_alone() -> None:
    turns = tree()
    prompt = turns.prompt([user("a")], [])
    odd = [*TOKENIZER.encode("b<user>c"), TOKENIZER.eos_token_id]
    turns.record(prompt, generation(odd), said("bc"))
    assert turns.prompt([user("a"), said("bc"), user("b<user>c")], []).parent is turns.turns[0]


@pytest.mark.parametrize("template", ["plain", "drops earlier thoughts"])
def test_memory_grows_with_the_text_and_not_with_the_calls(template: str) -> None:
    """Each call sends its whole history. Twice as many calls take twice the memory, whether they extend or fork."""
    made = tokenizer(TEMPLATES[template])

    def used(calls: int) -> int:
        tracemalloc.start()
        tree, history = TurnTree(ChatFormat(made)), [user("a")]
        for number in range(calls):
            prompt = tree.prompt([replace(message, content=f"{message.content} "[:-1]) for message in history], [])
            reply = Message("assistant", f"<think>{number}</think>b")
            tree.record(prompt, generation(made.encode(reply.content, add_special_tokens=False)), reply)
            history += [reply, user(f"{number} " * 700)]
        del prompt
        gc.collect()
        size, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert len(tree.turns) == calls
        return size

    used(2)
    assert used(32) < 2.5 * used(16)


def test_fields_of_a_branch_are_stored_once_and_joined_in_its_row() -> None:
    turns, history, told = TurnTree(ChatFormat(TOKENIZER)), [user("a")], list[np.ndarray]()
    for number in range(3):
        prompt = turns.prompt(history, [])
        ids = [*TOKENIZER.encode("b", add_special_tokens=False), TOKENIZER.eos_token_id]
        routes = number * 1000 + np.arange(len(prompt.input.token_ids) + len(ids))
        told.append(routes)
        reply = Message("assistant", "b")
        turns.record(prompt, replace(generation(ids), fields={"routes": routes}), reply)
        history += [reply, user("c")]
    expected = told[0]
    for routes in told[1:]:
        expected = np.concatenate([expected, routes[len(expected) :]])
    (row,) = turns.rows()
    assert row.segment.fields["routes"].tolist() == expected.tolist()
    assert sum(len(turn.generation.fields["routes"]) for turn in turns.turns) == len(expected)


TITLE, MAIN, HELPER = "title", "main", "helper"


async def rollout(template: str) -> Session:
    """A title by another model, a main agent that repeats its first call, and a longer subagent in its middle."""
    said: list[str] = []

    async def sample(_: Any) -> Generation:
        return generation([*TOKENIZER.encode(said.pop(), add_special_tokens=False), TOKENIZER.eos_token_id])

    form = response_form(tokenizer(template), "none")
    session = Session(ChatFormat(tokenizer(template)), sample, form, SessionLimits(99, 99, 9999))

    async def ask(history: list[Message], text: str, model: str = "policy") -> list[Message]:
        said.append(text)
        turn = await session.call(Call(tuple(history), (), model))
        return [*history, turn.forms[0], Message("user", "next")]

    await ask([Message("user", TITLE)], "0", model="small")
    await ask([Message("user", MAIN)], "1")
    main = await ask([Message("user", MAIN)], "2")
    helper = [Message("user", HELPER)]
    for text in ("a", "b", "c"):
        helper = await ask(helper, text)
    await ask(await ask(main, "3"), "4")
    return session


@pytest.mark.parametrize("template", ["plain", "header of the whole"])
@pytest.mark.parametrize(
    ("kinds", "trained"),
    [
        ((), "012abc34"),
        (("other_models",), "12abc34"),
        (("discarded",), "02abc34"),
        (("side_chains",), "234"),
        (("discarded", "other_models"), "2abc34"),
        (("discarded", "other_models", "side_chains"), "234"),
    ],
)
def test_excluded_calls_carry_no_loss(template: str, kinds: tuple[Untrained, ...], trained: str) -> None:
    """The second template rewrites the past, so that each call is a row."""
    session = asyncio.run(rollout(TEMPLATES[template]))
    rows, judged = session.rows(kinds)
    assert judged is session.tree.turns[-1] and rows[-1].segment.token_ids.tolist()[-1] == judged.token_ids[-1]
    ids = [token for row in rows for token in row.segment.token_ids[row.segment.loss_mask].tolist()]
    assert sorted(TOKENIZER.decode(ids).replace("<eos>", "")) == sorted(trained)
    ends = {*trained} & {*"014c"} if template == "plain" else trained
    assert len(rows) == len(ends)


def test_excluded_calls_leave_what_remains() -> None:
    session = asyncio.run(rollout(PLAIN))
    turns = session.tree.turns
    turns[:] = turns[:3]
    assert len(session.rows(("discarded",))[0]) == 3
    session = asyncio.run(rollout(PLAIN))
    session.tree.turns[:] = session.tree.turns[:1]
    assert session.rows(("other_models", "side_chains")) == ([], None)
    session = asyncio.run(rollout(PLAIN))
    first, middle, last = session.tree.turns[3:6]
    session.tree.turns[:] = [first, middle, last]
    (row,) = session.tree.rows({middle})
    trained = [*first.generation.token_ids, *last.generation.token_ids]
    assert row.segment.token_ids[row.segment.loss_mask].tolist() == trained
    assert row.segment.token_ids.tolist() == last.token_ids[len(first.prompt.input.token_ids) :]


SHELL = ("shell", "read")


@pytest.mark.parametrize(
    ("calls", "judged", "trained"),
    [
        # history, its tools, whether it goes on, and the answer
        ("main 1 shell, main 2 shell, memory N none", "2", "12"),
        ("main 1 shell, main 2 shell, title T none", "2", "12"),
        ("title T none, main 1 shell", "1", "1"),
        ("main 1 shell, main 2 shell, main S shell, short 3 shell, short 4 shell", "4", "12S34"),
        ("main 1 shell, helper a read, helper b read, main 2 shell, main 3 shell", "3", "123"),
        ("main 1 shell, helper a shell, helper b shell, main 2 shell", "2", "1ab2"),
    ],
)
def test_the_judged_turn_and_auxiliary_calls(calls: str, judged: str, trained: str) -> None:
    """A memory subagent or a title that comes last, a compaction, and subagents with and without other tools."""
    said, histories = list[str](), dict[str, list[Message]]()

    async def sample(_: Any) -> Generation:
        return generation([*TOKENIZER.encode(said.pop(), add_special_tokens=False), TOKENIZER.eos_token_id])

    async def run() -> Session:
        made = tokenizer("{{ tools }}" + TEMPLATES["plain"])
        session = Session(ChatFormat(made), sample, response_form(made, "none"), SessionLimits(99, 99, 9999))
        for history, text, names in (call.split() for call in calls.split(", ")):
            said.append(text)
            messages = histories.setdefault(history, [Message("user", history)])
            tools = tuple({"type": "function", "function": {"name": name}} for name in SHELL if name == names)
            turn = await session.call(Call(tuple(messages), tools))
            messages += [turn.forms[0], Message("user", "next")]
        return session

    session = asyncio.run(run())
    main = trained if "helper a shell" not in calls else "12"
    for kinds, expected in ((("auxiliary",), trained), (("side_chains",), main)):
        rows, found = session.rows(kinds)
        assert found is not None
        assert TOKENIZER.decode(found.generation.token_ids) == f"{judged}<eos>"
        assert found.number == rows[-1].numbers[-1]
        ids = [token for row in rows for token in row.segment.token_ids[row.segment.loss_mask].tolist()]
        assert sorted(TOKENIZER.decode(ids).replace("<eos>", "")) == sorted(expected)
    rows, found = session.rows(())
    assert found is not None and found.number in rows[-1].numbers  # judged, though everything is trained
