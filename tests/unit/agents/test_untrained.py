"""Calls that ``rollout.agent.untrained`` excludes."""

import asyncio
from typing import Any

import numpy as np
import pytest

from slime_like.agents.calls import Call
from slime_like.agents.messages import Message
from slime_like.agents.rendering import ChatFormat
from slime_like.agents.responses import response_form
from slime_like.agents.session import Session, SessionLimits
from slime_like.config.rollout import Untrained
from slime_like.interfaces import Generation
from tests.unit.agents.histories import PLAIN, TEMPLATES, tokenizer

TOKENIZER = tokenizer(PLAIN)

TITLE, MAIN, HELPER = "title", "main", "helper"


async def rollout(template: str) -> Session:
    """A title by another model, a main agent that repeats its first call, and a longer subagent in its middle."""
    said: list[str] = []

    async def sample(_: Any) -> Generation:
        tokens = [*TOKENIZER.encode(said.pop(), add_special_tokens=False), TOKENIZER.eos_token_id]
        return Generation(np.array(tokens), np.full(len(tokens), -1.0), np.zeros(len(tokens), np.int64), "stop")

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
    rows = session.rows(kinds)
    ids = [token for row in rows for token in row.segment.token_ids[row.segment.loss_mask].tolist()]
    assert sorted(TOKENIZER.decode(ids).replace("<eos>", "")) == sorted(trained)
    ends = {*trained} & {*"014c"} if template == "plain" else trained
    assert len(rows) == len(ends)


def test_a_repetition_that_nothing_continues_discards_nothing() -> None:
    session = asyncio.run(rollout(PLAIN))
    turns = session.tree.turns
    turns[:] = turns[:3]
    assert len(session.rows(("discarded",))) == 3


def test_a_rollout_of_excluded_calls_has_no_rows() -> None:
    session = asyncio.run(rollout(PLAIN))
    session.tree.turns[:] = session.tree.turns[:1]
    assert session.rows(("other_models", "side_chains")) == []


def test_an_excluded_call_in_the_middle_stays_in_the_prompt() -> None:
    session = asyncio.run(rollout(PLAIN))
    first, middle, last = session.tree.turns[3:6]
    session.tree.turns[:] = [first, middle, last]
    (row,) = session.tree.rows({middle})
    trained = [*first.generation.token_ids, *last.generation.token_ids]
    assert row.segment.token_ids[row.segment.loss_mask].tolist() == trained
    assert row.segment.token_ids.tolist() == last.token_ids[len(first.prompt.input.token_ids) :]
