"""Calls and answers of the three protocols, without a server."""

import asyncio
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from slime_like.agents import anthropic_protocol, openai_protocol, responses_protocol
from slime_like.agents.calls import Call, CallRejected
from slime_like.agents.rendering import ChatFormat, Message, ToolCall
from slime_like.agents.responses import response_form
from slime_like.agents.session import Session, SessionLimits
from slime_like.agents.turns import CallPrompt, Turn
from slime_like.interfaces import Generation, PromptInput
from tests.unit.agents.histories import PLAIN, generation, tokenizer

USER: Any = {"role": "user", "content": "hi"}
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGk="}}
PROTOCOLS = (openai_protocol, anthropic_protocol, responses_protocol)


def chat(*messages: Any, **settings: Any) -> Call:
    return openai_protocol.read_call({"messages": [*messages], **settings})


def anthropic(*messages: Any, **settings: Any) -> Call:
    return anthropic_protocol.read_call({"messages": [*messages], **settings})


def responses(*items: Any, **settings: Any) -> Call:
    return responses_protocol.read_call({"input": [*items], **settings})


def problem(read: Callable[..., Call], *messages: Any, **settings: Any) -> str:
    with pytest.raises(CallRejected) as caught:
        read(*messages, **settings)
    assert caught.value.status == 400
    return caught.value.problem


def turn(reply: Message) -> Turn:
    return Turn(CallPrompt(PromptInput([8]), "p", (), (), "p"), generation([9]), [8, 9], "pq", (), (reply,))


def ask(call: Call, template: str = PLAIN) -> Session:
    """Make a call of a model that says nothing."""

    async def sample(_: Any) -> Generation:
        return generation([9])

    async def run() -> Session:
        form = response_form(tokenizer(template), "none")
        session = Session(ChatFormat(tokenizer(template)), sample, form, SessionLimits(9, 9, 999))
        await session.call(call)
        return session

    return asyncio.run(run())


@pytest.mark.parametrize(
    ("read", "message", "path"),
    [
        (
            chat,
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]},
            "1.content.0.image_url",
        ),
        (anthropic, {"role": "user", "content": [{"type": "text", "text": "a"}, IMAGE]}, "1.content.1.image"),
        (
            anthropic,
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "x", "content": [IMAGE]}]},
            "1.content.0.tool_result.content.0.image",
        ),
        (responses, {"role": "user", "content": [{"type": "input_image"}]}, "1.message.content.0.input_image"),
        (
            responses,
            {"type": "function_call_output", "call_id": "x", "output": [{"type": "input_image"}]},
            "1.function_call_output.output.0.input_image",
        ),
    ],
)
def test_images_are_named_where_they_are(read: Callable[..., Call], message: Any, path: str) -> None:
    root = "input" if read is responses else "messages"
    assert problem(read, USER, message) == f"{root}.{path}: images are not supported"


def test_what_a_service_runs_is_named() -> None:
    search = {"type": "web_search_20250305", "name": "web_search"}
    words = "tools.0.web_search_20250305: web_search_20250305 is not supported"
    assert problem(anthropic, USER, tools=[search]) == words
    assert problem(chat, USER, tools=[{"type": "search"}]) == "tools.0.search: search is not supported"
    kept = {"type": "function", "name": "f", "parameters": {"type": "object"}}
    call = responses(USER, tools=[{"type": "web_search"}, {"type": "namespace", "name": "n", "tools": [kept]}, kept])
    function = {"name": "f", "description": None, "parameters": {"type": "object"}}
    assert call.tools == ({"type": "function", "function": function},)
    assert call.ignored == {"hosted_tools": "namespace, web_search"}
    assert problem(responses, USER, tools=[{"type": "function"}]) == "name: Field required"
    assert problem(anthropic, USER, tools=[{"name": "f"}]) == "tools.0.input_schema: Field required"


def test_items_of_stored_responses_are_named() -> None:
    words = "input.1.item_reference: item_reference is not supported"
    assert problem(responses, USER, {"type": "item_reference", "id": "x"}) == words
    assert problem(chat, {"role": "user", "content": [{"text": "a"}]}) == "messages.0.content.0.type: Field required"


@pytest.mark.parametrize("wished", [{"type": "json_object"}, {"type": "text"}])
def test_a_format_of_the_answer_is_rejected_unless_it_is_text(wished: dict[str, str]) -> None:
    settings: list[tuple[Callable[..., Call], dict[str, Any]]] = [
        (chat, {"response_format": wished}), (responses, {"text": {"format": wished, "verbosity": "low"}}),
        (anthropic, {"output_config": {"format": wished, "effort": "high"}}), (anthropic, {"output_format": wished}),
    ]  # fmt: skip
    for read, setting in settings:
        if wished["type"] == "text":
            assert read(USER, **setting).ignored.keys() <= {"text", "output_config"}
        else:
            assert "not supported" in problem(read, USER, **setting)
    for name in ("guided_json", "guided_regex", "guided_choice", "structured_outputs", "json_schema", "regex"):
        assert problem(chat, USER, **{name: "a"}).startswith(f"{name}='a' is not supported")


@pytest.mark.parametrize("setting", ["previous_response_id", "conversation", "background"])
def test_calls_that_count_on_stored_responses_are_rejected(setting: str) -> None:
    assert problem(responses, USER, **{setting: "x"}).startswith(f"{setting}='x' is not supported")


def test_thinking_is_answered_and_read_back() -> None:
    reply = Message("assistant", "b", (ToolCall("f", {"x": 1}),), reasoning="a")
    call = Call((Message("user", "hi"),), ())
    one = openai_protocol.answer(call, turn(reply))["choices"][0]["message"]
    two = anthropic_protocol.answer(call, turn(reply))["content"]
    three = responses_protocol.answer(call, turn(reply))["output"]
    assert one["reasoning_content"] == two[0]["thinking"] == three[0]["content"][0]["text"] == "a"
    assert two[0]["type"] == "thinking" and two[0]["signature"] and three[0]["type"] == "reasoning"
    read = (chat(USER, one), anthropic(USER, {"role": "assistant", "content": two}), responses(USER, *three))
    assert [each.messages[1] for each in read] == [reply] * 3
    renamed = {"role": "assistant", "content": "b", "reasoning": "a"}
    assert chat(USER, renamed).messages[1].reasoning == "a"
    for protocol in PROTOCOLS:
        assert '"a"' in "".join(protocol.events(call, turn(reply), 1))
        assert "reasoning" not in json.dumps(protocol.answer(call, turn(Message("assistant", "b")))["id"])


def test_streamed_thinking_is_signed_and_redacted_thinking_noted() -> None:
    events = "".join(anthropic_protocol.events(Call((), ()), turn(Message("assistant", "b", reasoning="a")), 1))
    deltas = [json.loads(line[6:])["delta"] for line in events.split("\n") if "_delta" in line and line[:4] == "data"]
    kinds = ["thinking_delta", "signature_delta", "text_delta"]
    assert [delta["type"] for delta in deltas if "type" in delta] == kinds
    blocks = [{"type": "redacted_thinking", "data": "x"}, {"type": "text", "text": "b"}]
    call = anthropic(USER, {"role": "assistant", "content": blocks}, USER)
    assert call.messages[1] == Message("assistant", "b") and call.ignored == {"redacted_thinking": "left out"}


def test_items_of_one_turn_are_one_message() -> None:
    def said(text: str) -> dict[str, Any]:
        return {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text}]}

    thought = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "t"}]}
    called = {"type": "function_call", "call_id": "x", "name": "f", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "x", "output": "1"}
    call = responses(USER, thought, said("a"), called, called, output, output, thought, called, said("b"), said("c"))
    f = ToolCall("f", {})
    assert call.messages[1:] == (
        Message("assistant", "a", (f, f), reasoning="t"),
        Message("tool", "1", call_id="functions.f:0", name="f"),
        Message("tool", "1", call_id="functions.f:1", name="f"),
        Message("assistant", "", (f,), reasoning="t"),
        Message("assistant", "b"),
        Message("assistant", "c"),
    )


def test_roles_parts_and_failed_tools_of_clients() -> None:
    refused = {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}
    call = chat({"role": "developer", "content": "s"}, refused, {"role": "function", "name": "f", "content": "1"})
    assert call.messages == (Message("system", "s"), Message("assistant", "no"), Message("tool", "1"))

    def result(**extra: Any) -> Any:
        return {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "x", "content": "no", **extra}]}

    called = {"role": "assistant", "content": [{"type": "tool_use", "id": "x", "name": "f", "input": {}}] * 3}
    given = anthropic(called, result(), result(is_error=True), result(is_error=False)).messages
    assert [message.content for message in given] == ["", "no", "Error: no", "no"]


@pytest.mark.parametrize("read", [chat, anthropic, responses])
def test_a_last_message_of_the_assistant_is_noted(read: Callable[..., Call]) -> None:
    session = ask(read(USER, {"role": "assistant", "content": "So"}))
    assert session.tree.turns[0].prompt.text == "<user>hi<assistant>So<eos>\n<assistant>"
    assert session.ignored == {"prefill": "the reply starts a new turn"}


LATE = [USER, {"role": "system", "content": "note"}]
FIRST_ONLY = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('late') }}{% endif %}"
    "{{ m.content }}{% endfor %}"
)


def test_a_late_system_message_is_rendered_or_named() -> None:
    assert ask(anthropic(*LATE)).tree.turns[0].prompt.text == "<user>hi<system>note<assistant>"
    with pytest.raises(CallRejected) as caught:
        ask(anthropic(*LATE), FIRST_ONLY)
    assert caught.value.problem.startswith("role 'system' is not supported here: TemplateError: late")
    with pytest.raises(CallRejected) as caught:
        ask(anthropic(*LATE), "{{ raise_exception('no') }}")
    assert caught.value.problem == "TemplateError: no"


def test_variables_and_tools_must_be_shown_by_the_template() -> None:
    call = chat(USER, chat_template_kwargs={"mood": "calm"})
    (asked,) = ask(call, PLAIN + "{{ mood }}").tree.turns
    assert asked.prompt.text == "<user>hi<assistant>calm"
    assert "chat_template_kwargs" in problem(chat, USER, chat_template_kwargs={"tools": []})
    tool = {"type": "function", "function": {"name": "add", "parameters": {}}}
    with pytest.raises(CallRejected) as caught:
        ask(chat(USER, tools=[tool]))
    assert (caught.value.status, caught.value.code) == (400, "tools_not_rendered")
    (asked,) = ask(chat(USER, tools=[tool]), "{% if tools %}{{ tools[0].function.name }}{% endif %}" + PLAIN).tree.turns
    assert asked.prompt.text == "add<user>hi<assistant>"


def calls_and_results(read: Callable[..., Call], order: str, calls: str = "ab") -> Call:
    """Make a history in which two tools are called and answer in this order."""
    if read is chat:
        said = [{"id": i, "type": "function", "function": {"name": f"f{i}", "arguments": "{}"}} for i in calls]
        results = [{"role": "tool", "tool_call_id": i, "content": i} for i in order]
        return chat(USER, {"role": "assistant", "tool_calls": said}, *results)
    if read is anthropic:
        uses = [{"type": "tool_use", "id": i, "name": f"f{i}", "input": {}} for i in calls]
        blocks = [{"type": "tool_result", "tool_use_id": i, "content": i} for i in order]
        return anthropic(USER, {"role": "assistant", "content": uses}, {"role": "user", "content": blocks})
    items = [{"type": "function_call", "call_id": i, "name": f"f{i}", "arguments": "{}"} for i in calls]
    return responses(USER, *items, *({"type": "function_call_output", "call_id": i, "output": i} for i in order))


@pytest.mark.parametrize("read", [chat, anthropic, responses])
def test_results_are_paired_by_id_in_the_order_of_the_calls(read: Callable[..., Call]) -> None:
    answers = [Message("tool", i, call_id=f"functions.f{i}:{index}", name=f"f{i}") for index, i in enumerate("ab")]
    for order in ("ab", "ba"):
        assert [*calls_and_results(read, order).messages[2:]] == answers
    (answer,) = calls_and_results(read, "b").messages[2:]  # the first call has no result
    assert answer == answers[1] != replace(answers[1], call_id=answers[0].call_id)
    assert answers[1].key != replace(answers[1], call_id=answers[0].call_id).key
    for order in ("abc", "aba", "abb"):
        with pytest.raises(CallRejected) as caught:
            calls_and_results(read, order)
        assert (caught.value.status, caught.value.code) == (400, "unpaired_tool_result")


def test_an_id_belongs_to_the_last_call_with_it() -> None:
    """A result never moves in front of a turn that was sampled without it, and ids may be used again."""

    def called(*ids: str) -> dict[str, Any]:
        return {"role": "assistant", "tool_calls": [{"id": i, "function": {"name": i, "arguments": "{}"}} for i in ids]}

    def result(i: str) -> dict[str, str]:
        return {"role": "tool", "tool_call_id": i, "content": i}

    call = chat(USER, called("a", "b"), result("b"), called("c"), result("c"), result("a"), called("c"), result("c"))
    assert [message.name for message in call.messages if message.role == "tool"] == ["b", "a", "c", "c"]


GRAMMAR = {"syntax": "lark", "definition": "start: /.+/s"}
PATCH = {"name": "patch", "description": "Edit.", "format": {"type": "grammar", **GRAMMAR}}


def test_a_custom_tool_is_a_function_of_one_text() -> None:
    nested = {"type": "custom", "custom": {**PATCH, "format": {"type": "grammar", "grammar": GRAMMAR}}}
    one, two = chat(USER, tools=[nested]), responses(USER, tools=[{"type": "custom", **PATCH}])
    (shown,) = one.tools
    assert shown["function"]["parameters"]["required"] == ["input"]
    assert all(json.dumps(GRAMMAR)[1:-1] in call.tools[0]["function"]["description"] for call in (one, two))
    free = responses(USER, tools=[{"type": "custom", "name": "patch", "format": {"type": "text"}}])
    assert free.tools[0]["function"]["description"] == ""
    assert problem(responses, USER, tools=[{"type": "custom"}]) == "name: Field required"
    for arguments, text in (
        ({"input": "+a"}, "+a"),
        ({"patch": "+a"}, '{"patch": "+a"}'),
        ({"input": 1}, '{"input": 1}'),
    ):
        said = turn(Message("assistant", "", (ToolCall("patch", arguments), ToolCall("other", {"x": 1}))))
        (custom, function) = openai_protocol.answer(one, said)["choices"][0]["message"]["tool_calls"]
        assert custom["type"] == "custom" and custom["custom"] == {"name": "patch", "input": text}
        assert function["function"] == {"name": "other", "arguments": '{"x": 1}'}
        (item, other) = responses_protocol.answer(two, said)["output"]
        assert (item["type"], item["input"], other["type"]) == ("custom_tool_call", text, "function_call")
        streamed = "".join(responses_protocol.events(two, said, 1))
        assert json.dumps(text, ensure_ascii=False) in streamed and "custom_tool_call_input.done" in streamed
        results = {"role": "tool", "tool_call_id": custom["id"], "content": "ok"}
        output = {"type": "custom_tool_call_output", "call_id": item["call_id"], "output": "ok"}
        read = chat(USER, {"role": "assistant", "tool_calls": [custom]}, results), responses(USER, item, output)
        for call in read:
            assert call.messages[1].tool_calls == (ToolCall("patch", {"input": text}),)
            assert call.messages[2] == Message("tool", "ok", call_id="functions.patch:0", name="patch")
