"""Verdicts on chat templates: sound, adversarial, and those of installed packages."""

import io
import itertools
import json
from typing import Any

import pytest

from slime_like.data.spans import ConversationEncoder
from slime_like.examples.tiny_model import byte_tokenizer
from slime_like.verification.template import properties
from slime_like.verification.template.histories import History, HistoryGenerator, shrink
from slime_like.verification.template.report import print_conversation, print_verdicts, sample, word_of
from slime_like.verification.template.subject import Verdict
from slime_like.verification.template.verify import verify_template
from tests.support import templates
from tests.support.templates import tokenizer_of

HISTORIES = 12
MISTRAL = ("[INST]", "[/INST]", "[TOOL_CALLS]", "[ARGS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]")


def judge(tokenizer: Any) -> dict[str, Verdict]:
    verdicts = verify_template(ConversationEncoder(tokenizer), tokenizer, histories=HISTORIES)
    return {verdict.tested.code: verdict for verdict in verdicts}


# template, codes of needed properties that fail, codes of others that fail beside no-forging
VERDICTS: dict[str, tuple[str, str, str]] = {
    "sound": (templates.SOUND, "", ""),
    "generation markers": (templates.MARKED, "", ""),
    "markers to the next header": (templates.MARKED_TO_THE_NEXT, "", ""),
    "markers too short": (templates.MARKED_TOO_SHORT, "spans marks", ""),
    "drops thinking": (templates.DROPS_THINKING, "thinking", ""),
    "merges answers of tools": (templates.MERGES_TOOLS, "", "tools-apart"),
    "strips white space": (templates.STRIPS, "answer-space", "other-space"),
    "two BOS": (templates.TWO_BOS, "one-bos", ""),
    "dated": (templates.DATED, "date", ""),
    "depends on history": (templates.COUNTS, "user-prefix tool-prefix assistant-prefix spans", "tools-apart"),
    "another generation prompt": (templates.THINKS_FIRST, "generation-prompt spans", ""),
    "no generation prompt": (templates.NO_PROMPT, "generation-prompt spans", ""),
    "default system message": (templates.DEFAULT_SYSTEM, "", "no-default-system"),
    "no end of turn": (templates.NO_END, "end-of-turn spans", ""),
    "ignores tools": (templates.IGNORES_TOOLS, "", "tools"),
    "vLLM's chatml": (templates.of_vllm("chatml"), "end-of-turn spans", "tools"),
    "MiniCPM-V 4.5, as Qwen3": (templates.of_vllm("minicpmv45"), "assistant-prefix thinking spans", "tools-apart"),
}


@pytest.mark.parametrize("name", VERDICTS)
def test_each_template_fails_what_is_wrong_with_it(name: str) -> None:
    template, needed, others = VERDICTS[name]
    verdicts = judge(tokenizer_of(template))
    assert {code for code, verdict in verdicts.items() if verdict.is_fatal} == set(needed.split())
    failing = {code for code, verdict in verdicts.items() if not verdict.holds}
    assert failing - set(needed.split()) == {*others.split(), "no-forging"}
    for code in failing:
        example = verdicts[code].example
        assert example is not None and len(example.messages) <= 5


def test_the_tiny_models_own_template_fits() -> None:
    verdicts = judge(byte_tokenizer())
    assert {code for code, verdict in verdicts.items() if not verdict.holds} == {"tools", "no-forging"}
    assert not any(verdict.is_fatal for verdict in verdicts.values())


@pytest.mark.parametrize(("version", "needed"), [("v3", "prefix"), ("v13", "")])
def test_mistrals_templates(version: str, needed: str) -> None:
    """Up to version 11 tools stand before the last message of the user, and move when another follows."""
    tokenizer = tokenizer_of(templates.of_mistral(version), eos="<eos>", control=MISTRAL)
    chosen = {each.code: each for each in properties.PROPERTIES if each.code in ("assistant-prefix", "end-of-turn")}
    subject = properties.Subject(tokenizer, ConversationEncoder(tokenizer))
    draw = HistoryGenerator(0, tools=True).draw
    found: dict[str, list[str]] = {code: [] for code in chosen}
    for history in [draw() for _ in range(6)]:
        for code, each in chosen.items():
            found[code] += each.find(subject, history)
    assert any(found["assistant-prefix"]) is bool(needed)
    assert found["end-of-turn"] and not any(found["end-of-turn"])


def test_a_template_that_takes_no_conversation_fails() -> None:
    verdicts = judge(tokenizer_of(templates.chatml(head="{{ raise_exception('no') }}")))
    assert {code for code, verdict in verdicts.items() if verdict.is_fatal} == {"conversations"}
    assert verdicts["spans"].tried == 0 and word_of(verdicts["spans"]) == "not tried"


def test_histories_are_the_seeds() -> None:
    drawn = [[HistoryGenerator(seed, tools=True).draw().text() for _ in range(3)] for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]


def test_the_smallest_history_is_found() -> None:
    """It fails if two answers of tools follow one another; nothing else is needed for that."""

    def fails(history: History) -> bool:
        roles = [message["role"] for message in history.messages]
        return ("tool", "tool") in itertools.pairwise(roles)

    generator = HistoryGenerator(0, tools=True, thinking=True, edges=True)
    failing = next(history for history in iter(generator.draw, None) if fails(history))
    smallest = shrink(failing, fails)
    assert [message["role"] for message in smallest.messages] == ["user", "assistant", "tool", "tool"]
    assert smallest.tools is None and smallest.messages[0]["content"] == "x"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_what_carries_loss_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """In colour on a terminal, else in brackets; text cannot command the terminal."""
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    encoder = ConversationEncoder(byte_tokenizer())
    messages = [{"role": "user", "content": "a\x1b[31m"}, {"role": "assistant", "content": "[b]"}]
    shown, coloured = io.StringIO(), Terminal()
    print_conversation("here", encoder.encode(messages), shown)
    assert shown.getvalue().splitlines()[1] == "<user>a\\x1b[31m<assistant>\u27e6[b]<eos>\u27e7"
    print_conversation("here", encoder.encode(messages), coloured)
    assert "\u27e6" not in coloured.getvalue() and "\x1b[31m" not in coloured.getvalue()
    assert "m[b]<eos>\x1b[0m" in coloured.getvalue()


def test_the_table_has_a_row_for_every_property_and_the_smallest_history_of_each_failure() -> None:
    stream = io.StringIO()
    verdicts = list(judge(tokenizer_of(templates.NO_END)).values())
    print_verdicts("here", verdicts, stream)
    rows = [line.split("│") for line in stream.getvalue().splitlines() if line.startswith("│")]
    words = {row[1].strip(): row[4].strip() for row in rows}
    assert words == {verdict.tested.code: word_of(verdict) for verdict in verdicts}
    assert words["end-of-turn"] == "FAILS" and words["no-forging"] == "no" and words["marks"] == "not tried"
    shown = stream.getvalue().partition("end-of-turn: ")[2].splitlines()[1].strip().removeprefix("smallest: ")
    assert [message["role"] for message in json.loads(shown)] == ["user", "assistant"]


def test_the_sample_has_a_tool_where_the_template_takes_one() -> None:
    with_tool = sample(ConversationEncoder(tokenizer_of(templates.SOUND)))
    without = sample(ConversationEncoder(byte_tokenizer()))
    assert len(with_tool.spans) == 3 and len(without.spans) == 2
