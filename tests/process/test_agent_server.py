"""The endpoint with OpenAI's and Anthropic's clients and a scripted model."""

import asyncio
import functools
import json
import random
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import anthropic
import openai
import pytest
from anthropic.types import TextBlock, ToolUseBlock
from openai.types.responses import ResponseStreamEvent
from pydantic import TypeAdapter

from slime_like.agents.calls import MODEL
from slime_like.agents.rendering import ChatFormat
from slime_like.agents.responses import response_form
from slime_like.agents.server import AgentServer
from slime_like.agents.session import SampleCall, Session, SessionLimits
from slime_like.errors import EngineError
from slime_like.interfaces import Generation
from tests.unit.agents.histories import PLAIN, generation, tokenizer

TOKENIZER = tokenizer("{% if tools %}{{ tools[0].function.name }}{% endif %}" + PLAIN)
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": "\u00e9"}}</tool_call>'
PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}}}
JSON = {"type": "json_object"}
USER: Any = {"role": "user", "content": "hi"}


def ids(text: str) -> list[int]:
    tokens: list[int] = TOKENIZER.encode(text, add_special_tokens=False)
    return tokens


@dataclass
class Model:
    """Model that follows a script and records calls. "wait" never ends."""

    script: list[str]
    asked: list[SampleCall] = field(default_factory=list)
    cancelled: int = 0

    async def __call__(self, asked: SampleCall) -> Generation:
        self.asked.append(asked)
        said = self.script.pop(0) if self.script else "ok"
        if said == "die":
            raise EngineError("it died")
        if said == "wait":
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                self.cancelled += 1
                raise
        if said.endswith("..."):
            return generation(ids(said.removesuffix("...")), "length")
        return generation([*ids(said), TOKENIZER.eos_token_id])


@dataclass
class Endpoint:
    server: AgentServer
    session: Session
    model: Model

    def openai(self, key: str | None = None, **settings: Any) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=f"{self.server.base_url}/v1", api_key=key or self.session.key, **settings)

    def anthropic(self, key: str | None = None) -> anthropic.AsyncAnthropic:
        return anthropic.AsyncAnthropic(base_url=self.server.base_url, api_key=key or self.session.key)


@asynccontextmanager
async def endpoint(*script: str, **limits: int) -> AsyncIterator[Endpoint]:
    bounds = {"max_calls": 8, "max_new_tokens": 100, "max_model_len": 400, **limits}
    model = Model(list(script))
    session = Session(ChatFormat(TOKENIZER), model, response_form(TOKENIZER), SessionLimits(**bounds))
    server = AgentServer()
    await server.start()
    server.open_session(session)
    try:
        yield Endpoint(server, session, model)
    finally:
        await server.close()


def bounded(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Run an asynchronous test for at most a minute."""

    @functools.wraps(test)
    def run(**arguments: Any) -> None:
        asyncio.run(asyncio.wait_for(test(**arguments), 60))

    return run


SAID = ("hello \u00e9", f"so\n{CALL}{CALL}", CALL, "cut off...", "")
TWICE = [said for said in SAID for _ in range(2)]
ADDED = ("add", {"a": 1, "b": "\u00e9"})


@bounded
async def test_openai_streamed_equals_unstreamed() -> None:
    tools: Any = [{"type": "function", "function": {"name": "add", "parameters": PARAMETERS}}]
    asked: Any = {"model": "any", "messages": [USER], "tools": tools, "temperature": 0.3, "stop": ["zz"]}
    asked |= {"tool_choice": "required", "user": "me", "extra_body": {"chat_template_kwargs": {"x": 1}}}
    async with endpoint(*TWICE, max_calls=10) as here, here.openai() as client:
        for said in SAID:
            whole = await client.chat.completions.create(**asked)
            stream = await client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
            chunks = [chunk async for chunk in stream]
            (first,), usage = whole.choices, chunks[-1].usage
            parts = [choice for chunk in chunks for choice in chunk.choices]
            assert [part.finish_reason for part in parts] == [None, first.finish_reason]
            assert "".join(part.delta.content or "" for part in parts) == (first.message.content or "")
            streamed = [(c.index, c.function) for part in parts for c in part.delta.tool_calls or ()]
            calls = [call.function for call in first.message.tool_calls or () if call.type == "function"]
            assert [(i, (c.name, c.arguments)) for i, c in enumerate(calls)] == [
                (index, (f.name, f.arguments)) for index, f in streamed if f is not None
            ]
            assert [(call.name, json.loads(call.arguments)) for call in calls] == [ADDED] * said.count("<tool_call>")
            assert whole.usage is not None and usage is not None and whole.usage == usage
            assert whole.usage.prompt_tokens == len(here.model.asked[-1].prompt.token_ids)
            wanted = "tool_calls" if "<tool_call>" in said else "length" if said.endswith("...") else "stop"
            assert first.finish_reason == wanted
        assert here.session.ignored == {"temperature": "0.3", "tool_choice": "required"}
        assert {asked.max_new_tokens for asked in here.model.asked} == {100}


@bounded
async def test_anthropic_streamed_equals_unstreamed() -> None:
    tools: Any = [{"name": "add", "description": "adds", "input_schema": PARAMETERS}]
    asked: Any = {"model": "any", "max_tokens": 9, "system": "be", "messages": [USER], "tools": tools}
    async with endpoint(*TWICE, max_calls=10) as here, here.anthropic() as client:
        for said in SAID:
            whole = await client.messages.create(**asked)
            async with client.messages.stream(**asked) as stream:
                streamed = await stream.get_final_message()
            blocks = [
                [(b.type, b.text if isinstance(b, TextBlock) else (b.name, b.input)) for b in message.content
                 if isinstance(b, TextBlock | ToolUseBlock)]
                for message in (whole, streamed)
            ]  # fmt: skip
            assert blocks[0] == blocks[1]
            assert [each for kind, each in blocks[0] if kind == "tool_use"] == [ADDED] * said.count("<tool_call>")
            wanted = "tool_use" if "<tool_call>" in said else "max_tokens" if said.endswith("...") else "end_turn"
            assert whole.stop_reason == streamed.stop_reason == wanted
            assert whole.usage.input_tokens == streamed.usage.input_tokens == len(here.model.asked[-1].prompt.token_ids)
            assert whole.usage.output_tokens == streamed.usage.output_tokens > 0
        assert TOKENIZER.decode(here.model.asked[-1].prompt.token_ids).startswith("add<system>be<user>hi")


@bounded
async def test_responses_streamed_equals_unstreamed() -> None:
    tools: Any = [{"type": "function", "name": "add", "parameters": PARAMETERS}, {"type": "web_search"}]
    asked: Any = {"model": "any", "instructions": "be", "input": "hi", "tools": tools, "store": False}
    async with endpoint(*TWICE, max_calls=10) as here, here.openai() as client:
        for said in SAID:
            whole = await client.responses.create(**asked, text={"format": {"type": "text"}})
            events = [event async for event in await client.responses.create(**asked, stream=True)]
            assert [event.sequence_number for event in events] == list(range(len(events)))
            for event in events:  # the client itself is lenient
                TypeAdapter(ResponseStreamEvent).validate_python(event.model_dump(by_alias=True, warnings=False))
            first, last = events[0], events[-1]
            wanted = "incomplete" if said.endswith("...") else "completed"
            assert (first.type, last.type) == ("response.created", f"response.{wanted}")
            streamed: Any = last.response  # type: ignore[union-attr]
            assert first.response.id == streamed.id  # type: ignore[union-attr]
            assert streamed.status == whole.status == wanted
            for reply in (whole, streamed):
                calls = [(o.name, json.loads(o.arguments)) for o in reply.output if o.type == "function_call"]
                assert calls == [ADDED] * said.count("<tool_call>")
                assert reply.output_text == said.partition("<tool_call>")[0].strip().removesuffix("...")
            deltas = "".join(event.delta for event in events if event.type == "response.output_text.delta")
            assert deltas == whole.output_text
            assert whole.usage == streamed.usage and whole.usage is not None
            assert whole.usage.input_tokens == len(here.model.asked[-1].prompt.token_ids)
        assert TOKENIZER.decode(here.model.asked[-1].prompt.token_ids).startswith("add<system>be<user>hi")
        assert here.session.ignored.keys() == {"hosted_tools", "text"}


@bounded
async def test_stop_strings_of_a_call_end_its_turn_and_are_not_in_the_answer() -> None:
    """The next call continues after the ids that were sampled, the string included."""
    script = "see </a>", "so </b>", "no stop", "plain"
    async with endpoint(*script) as here, here.openai() as client, here.anthropic() as other:
        said: list[Any] = [USER]
        for stop in (["</a>"], "</b>"):
            choice = (await client.chat.completions.create(model="m", messages=said, stop=stop)).choices[0]
            assert choice.finish_reason == "stop" and choice.message.content in ("see ", "so ")
            said += [{"role": "assistant", "content": choice.message.content}, USER]
        asked: Any = {"model": "m", "max_tokens": 9, "stop_sequences": ["stop", "</c>"]}
        reply = await other.messages.create(messages=[USER], **asked)
        assert (reply.stop_reason, reply.stop_sequence) == ("stop_sequence", "stop")
        assert [each.text for each in reply.content] == ["no "]
        plain = await other.messages.create(messages=[USER], **asked)
        assert (plain.stop_reason, plain.stop_sequence) == ("end_turn", None)
        assert [each.stop for each in here.model.asked] == [("</a>",), ("</b>",), *[("stop", "</c>")] * 2]
        assert not here.session.ignored.keys() & {"stop", "stop_sequences"}
        sampled = [*here.model.asked[0].prompt.token_ids, *ids("see </a>")]
        assert here.model.asked[1].prompt.token_ids[: len(sampled)] == sampled


@bounded
async def test_both_protocols_continue_one_branch() -> None:
    """Each client sends a tool's result after its call. Call ids don't matter."""
    async with endpoint(f"so\n{CALL}", "3", "4") as here, here.openai() as one, here.anthropic() as other:
        tools: Any = [{"type": "function", "function": {"name": "add", "description": "", "parameters": PARAMETERS}}]
        first = await one.chat.completions.create(model="m", messages=[USER], tools=tools)
        message = first.choices[0].message
        assert message.tool_calls is not None
        result: Any = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "3"}
        history: list[Any] = [USER, message.model_dump(), result]
        await one.chat.completions.create(model="m", messages=history, tools=tools)
        use: Any = [
            {"type": "text", "text": "so"},
            {"type": "tool_use", "id": "x", "name": "add", "input": {"b": "\u00e9", "a": 1}},
        ]
        results: Any = [{"type": "tool_result", "tool_use_id": "x", "content": [{"type": "text", "text": "3"}]}]
        turns: Any = [USER, {"role": "assistant", "content": use}, {"role": "user", "content": results}]
        await other.messages.create(
            model="m", max_tokens=1, messages=turns,
            tools=[{"name": "add", "description": "", "input_schema": PARAMETERS}],  # type: ignore[typeddict-item]
        )  # fmt: skip
        second, third = here.session.tree.turns[1:]
        assert second.prompt.parent is third.prompt.parent is here.session.tree.turns[0]
        assert second.prompt.input == third.prompt.input
        assert [asked.repeat for asked in here.model.asked] == [0, 0, 1]
        assert [asked.turn for asked in here.model.asked] == [0, 1, 1]
        first_row, second_row = (row.segment for row in here.session.tree.rows())
        assert first_row.loss_mask.sum() == len(here.session.tree.turns[0].generation.token_ids) + len("3") + 1
        assert second_row.loss_mask.sum() == len("4") + 1


Rejected = tuple[int, str]


async def rejected(call: Awaitable[Any]) -> Rejected:
    """Return the status, and the code or message, of the client's error."""
    with pytest.raises((openai.APIStatusError, anthropic.APIStatusError)) as caught:
        await call
    error = caught.value
    code = error.code if isinstance(error, openai.APIStatusError) else str(error.body["error"]["message"])  # type: ignore[index]
    return error.status_code, str(code).partition(":")[0]


@bounded
async def test_clients_understand_rejections() -> None:
    async with endpoint(max_calls=1, max_model_len=40) as here:
        async with here.openai() as one, here.anthropic() as other:
            ask = one.chat.completions.create
            long: Any = {"role": "user", "content": "x" * 50}
            for stream in (False, True):  # what is known before sampling is a status of a stream, too
                asked: Any = {"model": "m", "messages": [long], "stream": stream}
                assert await rejected(ask(**asked)) == (400, "context_length_exceeded")
            tell = other.messages.create(model="m", max_tokens=1, messages=[long])
            assert await rejected(tell) == (400, "context_length_exceeded")
            unsupported = {"n": 2, "logit_bias": {"7": 1}, "logprobs": True, "extra_body": {"guided_json": JSON}}
            for setting in ({name: value} for name, value in unsupported.items()):
                asked = {"model": "m", "messages": [USER], **setting}
                assert await rejected(ask(**asked)) == (400, "unsupported_parameter")
            image: Any = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}
            with pytest.raises(openai.BadRequestError, match=r"messages\.0\.content\.0\.image_url: images are not sup"):
                await ask(model="m", messages=[image])
            again = one.responses.create(model="m", input="hi", previous_response_id="resp_1")
            assert await rejected(again) == (400, "unsupported_parameter")
            assert [model.id async for model in await one.models.list()] == [MODEL]
            await ask(model="m", messages=[USER])
            assert (await one.models.retrieve(MODEL)).id == (await other.models.retrieve(MODEL)).id == MODEL
            assert await rejected(ask(model="m", messages=[USER])) == (400, "max_calls_exceeded")
            assert here.session.rejections["max_calls_exceeded"] == 1
        async with here.openai("wrong") as one, here.anthropic("wrong") as other:
            assert await rejected(one.models.list()) == (401, "invalid_api_key")  # type: ignore[arg-type]
            tell = other.messages.create(model="m", max_tokens=1, messages=[USER])
            assert await rejected(tell) == (401, "invalid_api_key")
        here.server.close_session(here.session.key)
        async with here.openai() as one:
            assert await rejected(one.chat.completions.create(model="m", messages=[USER])) == (401, "invalid_api_key")
        assert len(here.model.asked) == 1


@bounded
async def test_a_disconnect_cancels_the_call_and_a_retry_is_recorded_once() -> None:
    async with endpoint("wait", "b") as here, here.openai(timeout=0.5, max_retries=1) as client:
        answer = await client.chat.completions.create(model="m", messages=[USER])
        assert answer.choices[0].message.content == "b"
        assert here.model.cancelled == 1 and len(here.model.asked) == 2
        assert [turn.forms[0].content for turn in here.session.tree.turns] == ["b"]
        assert here.model.asked[1].repeat == 1


@bounded
async def test_a_disconnect_from_a_stream_cancels_the_call() -> None:
    async with endpoint("wait") as here, here.openai() as client:
        stream = await client.responses.create(model="m", input="hi", stream=True)
        assert (await anext(aiter(stream))).type == "response.created"
        await stream.close()
        await until(lambda: here.model.cancelled == 1)
        assert here.session.tree.turns == []


@bounded
async def test_the_seventeenth_call_waits_for_a_place() -> None:
    async with endpoint(*["wait"] * 16, "a", "wait", max_calls=99) as here, here.openai(max_retries=0) as client:
        ask = client.chat.completions.create
        calls = [asyncio.ensure_future(ask(model="m", messages=[USER])) for _ in range(16)]
        await until(lambda: len(here.model.asked) == 16)
        waiting = asyncio.ensure_future(ask(model="m", messages=[USER], temperature=0.5))
        await until(lambda: "temperature" in here.session.ignored)
        assert len(here.model.asked) == 16 and not waiting.done()
        calls.pop().cancel()
        assert (await waiting).choices[0].message.content == "a"
        calls.append(asyncio.ensure_future(ask(model="m", messages=[USER])))
        await until(lambda: len(here.model.asked) == 18)
        calls.append(asyncio.ensure_future(ask(model="m", messages=[USER], seed=1)))
        await until(lambda: "seed" in here.session.ignored)
        here.server.close_session(here.session.key)
        assert {await rejected(call) for call in calls} == {(401, "session_closed")}
        assert sorted(asked.repeat for asked in here.model.asked) == list(range(18))
        assert here.model.cancelled == 17 and len(here.session.tree.turns) == 1


async def until(holds: Callable[[], bool]) -> None:
    while not holds():
        await asyncio.sleep(0.01)


STREAMED = [
    ("chat/completions", {"messages": [USER]}),
    ("messages", {"messages": [USER]}),
    ("responses", {"input": "hi"}),
]


@pytest.mark.parametrize(("path", "body"), STREAMED)
@bounded
async def test_a_stream_shows_signs_of_life_and_then_an_error(
    path: str, body: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slime_like.agents.server._PING_S", 0.01)
    async with endpoint("wait") as here, aiohttp.ClientSession(headers={"x-api-key": here.session.key}) as client:
        async with client.post(f"{here.server.base_url}/v1/{path}", json={**body, "stream": True}) as answer:
            assert (answer.status, answer.content_type) == (200, "text/event-stream")
            signs = [await answer.content.readuntil(b"\n\n") for _ in range(3)]
            here.server.close_session(here.session.key)
            last = (await answer.content.read()).decode().strip().split("\n\n")[-1]
        kinds = {"messages": "event: ping", "responses": "event: response.in_progress"}
        assert all(sign.decode().startswith(kinds.get(path, ": ")) for sign in signs[1:])
        assert last.startswith("event: error\ndata: ")
        error = json.loads(last.partition("data: ")[2])
        assert error["type"] == "error" and "has ended" in error["error"]["message"]
        assert here.session.rejections == {"session_closed": 1} and here.model.cancelled == 1


@bounded
async def test_an_engine_failure_ends_the_rollout_and_clients_raise_it_in_a_stream() -> None:
    async with endpoint(*["die"] * 4) as here, here.openai() as one, here.anthropic() as other:
        ask = one.chat.completions.create
        assert await rejected(ask(model="m", messages=[USER])) == (503, "engine_failed")
        assert str(here.session.failure.result()) == "it died"
        assert len(here.model.asked) == 1  # the client does not try again
        text: Any
        for create, text in ((ask, {"messages": [USER]}), (one.responses.create, {"input": "hi"})):
            with pytest.raises(openai.APIError, match="the engine failed"):
                async for _ in await create(model="m", stream=True, **text):
                    pass
        with pytest.raises(anthropic.APIError, match="engine_failed"):
            async for _ in await other.messages.create(model="m", max_tokens=9, messages=[USER], stream=True):
                pass


@bounded
async def test_tokens_are_counted_without_a_call_and_a_probe_needs_no_key() -> None:
    async with endpoint(max_calls=1) as here, here.anthropic() as client, aiohttp.ClientSession() as probe:
        counted = await client.messages.count_tokens(model="m", system="be", messages=[USER])
        await client.messages.create(model="m", max_tokens=1, system="be", messages=[USER])
        assert counted.input_tokens == len(here.model.asked[0].prompt.token_ids)
        assert (await probe.head(here.server.base_url)).status == 200


@bounded
async def test_a_long_prompt_is_refused_early_and_holds_no_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """``benchmarks/agent_load.py`` measures how long another session waits meanwhile."""
    seen: list[tuple[int, int]] = []
    usual = TOKENIZER.encode

    def encode(piece: str, **settings: Any) -> list[int]:
        seen.append((threading.get_ident(), len(piece)))
        return list(usual(piece, **settings))

    async with endpoint() as here, here.openai() as one, here.anthropic() as other:
        monkeypatch.setattr(TOKENIZER, "encode", encode)
        for text in ("x" * 3_000_000, "<eos>" * 600_000):
            long: Any = {"model": "m", "messages": [{"role": "user", "content": text}]}
            for call in (one.chat.completions.create(**long), other.messages.count_tokens(**long)):
                assert await rejected(call) == (400, "context_length_exceeded")
            threads, lengths = zip(*seen, strict=True)
            assert threading.get_ident() not in threads and sum(lengths) < 200_000
            seen.clear()


@bounded
async def test_a_rendering_without_end_is_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    endless = tokenizer("{% set r = range(99999) %}{% for a in r if endless %}{% for b in r %}{% for c in r %}"
                        "{% endfor %}{% endfor %}{% endfor %}" + PLAIN)  # fmt: skip
    monkeypatch.setattr("slime_like.models.tokenization._RENDERING_S", 0.2)
    monkeypatch.setitem(globals(), "TOKENIZER", endless)
    async with endpoint() as here, here.openai() as client:
        for variables, code in (({"endless": True}, 400), ({}, 200), ({"endless": True}, 400)):
            asked: Any = {"model": "m", "messages": [USER], "extra_body": {"chat_template_kwargs": variables}}
            if code == 200:
                await client.chat.completions.create(**asked)
            else:
                call = client.chat.completions.create(**asked)
                assert await rejected(call) == (code, "template_rejects_messages")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "body"), STREAMED)
@bounded
async def test_half_of_a_surrogate_pair_may_be_anywhere_in_a_call(
    path: str, body: dict[str, Any], stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """The second call has arguments that the model sampled with one."""
    call = '<tool_call>{"name": "add", "arguments": {"a": "\\ud800"}}</tool_call>'
    async with endpoint("ok", call) as here, aiohttp.ClientSession(headers={"x-api-key": here.session.key}) as client:
        url, odd = f"{here.server.base_url}/v1/{path}", "a\ud800"
        field = "input" if "input" in body else "messages"
        made = {"model": odd, field: [{**USER, "content": odd}], "stream": stream, "stop": [odd], odd: odd}
        made |= {"chat_template_kwargs": {"x": odd}} if path.startswith("chat") else {}
        tool = {"name": "add", "parameters": PARAMETERS, "input_schema": PARAMETERS, "function": {"name": "add"}}
        tool |= {} if path == "messages" else {"type": "function"}
        for given in (made, {**body, "stream": stream, "tools": [tool]}):
            async with client.post(url, json=given) as answer:
                text = (await answer.read()).decode()
                assert answer.status == 200 and "error" not in text.replace('"error": null', ""), text
        assert "\\ud800" in text
        assert {name for name in here.session.ignored if name.startswith("a")} == {"a?"}
    assert not caplog.records


@bounded
async def test_what_clients_write_is_bounded_and_printable(caplog: pytest.LogCaptureFixture) -> None:
    async with endpoint() as here, here.openai() as client:
        odd = {"a\x1b[31m\nforged": "\u202e\n", "x" * 999: "y" * 999, **{f"f{index}": 1 for index in range(999)}}
        tools: Any = [{"type": "\x1b[2J" * 999}]
        await client.responses.create(model="m", input="hi", tools=tools, extra_body=odd)
        for head in (
            "Bad\x1b[31mHeader",
            "Content-Length: z",
            f"x-api-key: {here.session.key}\r\nContent-Encoding: gzip",
        ):
            reader, writer = await asyncio.open_connection("127.0.0.1", int(here.server.base_url.rpartition(":")[2]))
            writer.write(f"POST /v1/messages HTTP/1.1\r\nHost: a\r\n{head}\r\nContent-Length: 3\r\n\r\nabc".encode())
            assert b" 400 " in await reader.readline()
            writer.close()
        assert not caplog.records
        ignored = here.session.ignored
        assert len(ignored) == 32 and all(
            len(text) <= 80 and text.isprintable() for text in (*ignored, *ignored.values())
        )


HOSTILE = 1000


def _hostile(draw: random.Random, key: str) -> tuple[str, str, dict[str, str], bytes]:
    """Return the method, path, headers and body of a request that no client sends."""
    odd: list[Any] = [None, 0, -1, 1e308, "", "\ud800", "x" * 9999, [], {}, [[]], {"role": "user"}, True, [None] * 99]
    value = odd[draw.randrange(len(odd))]
    message = {"role": draw.choice(["user", "root", 7]), "content": value}
    body: Any = {"model": value, "messages": draw.choice([[message], value, [value], [message] * 99])}
    body |= {draw.choice(["tools", "stop", "n", "stream", "system", "max_tokens", "tool_choice"]): value}
    text = json.dumps(draw.choice([body, value, [body]])).encode()
    texts = [text, text[: len(text) // 2], b"\xff\xfe" + text, b"[" * 5000, b"", b"NaN"]
    path = draw.choice(["/v1/chat/completions", "/v1/messages", "/v1/models", "/v1/../../etc/passwd", "/"])
    bearer = {"Authorization": f"bearer {key}", "Content-Type": draw.choice(["text/plain", "multipart/form-data", "a"])}
    wrong = [{}, {"x-api-key": "' OR 1"}, {"Authorization": "Bearer"}, {"Authorization": f"Basic {key}"}]
    headers = draw.choice([*wrong, {"x-api-key": key}, {"x-api-key": key}, bearer, bearer])
    return draw.choice(["POST"] * 4 + ["GET", "PUT", "DELETE", "OPTIONS"]), path, headers, draw.choice(texts)


@bounded
async def test_hostile_requests_are_rejected_with_a_reason() -> None:
    """Keys, paths, methods, JSON, types or sizes are wrong. A good call still succeeds afterwards."""
    draw = random.Random(0)
    async with endpoint(max_calls=HOSTILE) as here, aiohttp.ClientSession(here.server.base_url) as client:

        async def ask(number: int) -> tuple[int, str]:
            method, path, headers, body = _hostile(draw, here.session.key)
            async with client.request(method, path, headers=headers, data=body) as answer:
                content = await answer.json(content_type=None) if answer.content_type == "application/json" else {}
                if answer.status != 200 and method != "HEAD":
                    error = content["error"]
                    assert error["message"] and error["type"], (method, path, content)
                return answer.status, path

        statuses = [await ask(number) for number in range(HOSTILE)]
        assert {status for status, _ in statuses} == {200, 400, 401, 404, 405}
        assert sum(status == 200 for status, _ in statuses) < HOSTILE / 4  # some are valid by chance
        big = b" " * (33 * 2**20)
        headers = {"x-api-key": here.session.key}
        async with client.post("/v1/messages", headers=headers, data=big) as answer:
            assert (answer.status, (await answer.json())["error"]["type"]) == (413, "request_too_large")
        async with here.openai() as good:
            await good.chat.completions.create(model="m", messages=[USER])
