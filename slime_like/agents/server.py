"""HTTP server through which agents call the model. Each key opens one session."""

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, Protocol

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from slime_like.agents import anthropic_protocol, openai_protocol, responses_protocol
from slime_like.agents.calls import MODEL, Call, CallRejected
from slime_like.agents.session import Session
from slime_like.agents.turns import Turn
from slime_like.system.network import host_and_port, listen

_SERVED = "POST /v1/chat/completions, /v1/responses, /v1/messages, /v1/messages/count_tokens and GET /v1/models are"
_MAX_BODY_BYTES = 32 * 2**20
_BODY_TIMEOUT_S = 30.0
_SHUTDOWN_TIMEOUT_S = 2.0
_PING_S = 10.0
"""Time between signs of life in a stream. Clients give up after some minutes of silence."""
_CLIENTS_FAULTS = (HttpProcessingError, web.RequestPayloadError)
"""Requests that are not HTTP. Clients get the reason, and could fill the log with it."""

_LOGGER = logging.getLogger(__name__)
_LOGGER.addFilter(lambda record: not (record.exc_info and isinstance(record.exc_info[1], _CLIENTS_FAULTS)))

_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class _WireProtocol(Protocol):
    """Functions of a protocol module."""

    def read_call(self, body: Any) -> Call: ...

    def answer(self, call: Call, turn: Turn) -> dict[str, Any]: ...

    def waiting(self, call: Call, number: int) -> str: ...

    def events(self, call: Call, turn: Turn, number: int) -> Iterator[str]: ...

    def error_body(self, rejected: CallRejected) -> dict[str, Any]: ...


class AgentServer:
    """Sessions by key, and the server that looks them up. Listens only on ``host``. Belongs to one event loop."""

    def __init__(self, host: str = "127.0.0.1") -> None:
        self._host = host
        self._sessions: dict[str, Session] = {}
        self._runner: web.AppRunner | None = None
        self.base_url = ""

    async def start(self) -> None:
        """Start listening and set ``base_url`` to the address."""
        app = web.Application(client_max_size=_MAX_BODY_BYTES, middlewares=[self._errors])
        for prefix in ("", "/v1"):
            app.router.add_post(f"{prefix}/chat/completions", self._handler(openai_protocol))
            app.router.add_post(f"{prefix}/responses", self._handler(responses_protocol))
            app.router.add_get(f"{prefix}/models", self._models)
            app.router.add_get(f"{prefix}/models/{{name}}", self._models)
        app.router.add_post("/v1/messages", self._handler(anthropic_protocol))
        app.router.add_post("/v1/messages/count_tokens", self._count_tokens)
        app.router.add_head("/", _alive)
        self._runner = web.AppRunner(
            app, handler_cancellation=True, access_log=None, shutdown_timeout=_SHUTDOWN_TIMEOUT_S, logger=_LOGGER
        )
        await self._runner.setup()
        listener = listen(self._host, 0)
        await web.SockSite(self._runner, listener).start()
        self.base_url = f"http://{host_and_port(self._host, listener.getsockname()[1])}"

    async def close(self) -> None:
        for key in list(self._sessions):
            self.close_session(key)
        if self._runner is not None:
            await self._runner.cleanup()

    def open_session(self, session: Session) -> None:
        self._sessions[session.key] = session

    def close_session(self, key: str) -> None:
        """Forget the key and reject calls that are still waiting."""
        self._sessions.pop(key).close()

    def _found(self, request: web.Request) -> Session | None:
        scheme, _, bearer = request.headers.get("Authorization", "").partition(" ")
        key = request.headers.get("x-api-key") or (bearer.strip() if scheme.lower() == "bearer" else "")
        return self._sessions.get(key)

    def _session(self, request: web.Request) -> Session:
        session = self._found(request)
        if session is None:
            raise CallRejected(401, "invalid_api_key", "no rollout has this key; use the key of the task")
        return session

    async def _models(self, request: web.Request) -> web.Response:
        self._session(request)
        name = request.match_info.get("name")
        entry = openai_protocol.model_entry(name or MODEL)
        return web.json_response(entry if name else {"object": "list", "data": [entry], "has_more": False})

    async def _count_tokens(self, request: web.Request) -> web.Response:
        session = self._session(request)
        call = await session.outside(_read_call, anthropic_protocol, await _body(request))
        return web.json_response({"input_tokens": await session.outside(session.count_tokens, call)})

    def _handler(self, protocol: _WireProtocol) -> _Handler:
        async def handle(request: web.Request) -> web.StreamResponse:
            session = self._session(request)
            call = await session.outside(_read_call, protocol, await _body(request))
            if call.stream:
                return await _stream(request, protocol, call, session)
            return web.json_response(protocol.answer(call, await session.call(call)))

        return handle

    @web.middleware
    async def _errors(self, request: web.Request, handler: _Handler) -> web.StreamResponse:
        try:
            return await handler(request)
        except CallRejected as error:
            rejected = error
        except RecursionError:
            rejected = CallRejected(400, "invalid_request", "the messages are nested too deeply")
        except web.HTTPRequestEntityTooLarge:
            rejected = CallRejected(413, "request_too_large", f"the body has more than {_MAX_BODY_BYTES} bytes")
        except web.HTTPException as error:
            problem = f"{request.method} {request.path} is not served; {_SERVED}"
            rejected = CallRejected(error.status, "not_found", problem)
        if session := self._found(request):
            session.rejections[rejected.code] += 1
        protocol = anthropic_protocol if "/messages" in request.path else openai_protocol
        headers = {"x-should-retry": "true" if rejected.retry else "false"}
        return web.json_response(protocol.error_body(rejected), status=rejected.status, headers=headers)


async def _alive(_: web.Request) -> web.Response:
    return web.Response()


async def _body(request: web.Request) -> bytes:
    try:
        async with asyncio.timeout(_BODY_TIMEOUT_S):
            return await request.read()
    except web.RequestPayloadError as error:
        raise CallRejected(400, "invalid_body", "the body cannot be decoded") from error
    except TimeoutError as error:
        raise CallRejected(408, "body_timeout", f"the body did not arrive within {_BODY_TIMEOUT_S:.0f} s") from error


def _read_call(protocol: _WireProtocol, body: bytes) -> Call:
    """Parse a body. Halves of surrogate pairs, which no encoding can express, become question marks."""
    try:
        value = json.loads(body)
        if b"\\ud" in body.lower():
            value = json.loads(json.dumps(value, ensure_ascii=False).encode("utf-8", "replace"))
    except RecursionError as error:
        raise CallRejected(400, "invalid_json", "the body is nested too deeply") from error
    except ValueError as error:  # invalid JSON or invalid encoding
        raise CallRejected(400, "invalid_json", f"the body is not JSON ({error})") from error
    return protocol.read_call(value)


async def _stream(request: web.Request, protocol: _WireProtocol, call: Call, session: Session) -> web.StreamResponse:
    """Send the headers immediately, signs of life while the turn is sampled, and then the turn or an error."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    prepared = await session.outside(session.prepare, call)  # its rejection is still a status
    turn, sent = asyncio.ensure_future(session.sample(call, *prepared)), 0
    try:
        await response.prepare(request)
        while not turn.done() or not sent:
            await response.write(protocol.waiting(call, sent).encode())
            sent += 1
            await asyncio.wait([turn], timeout=_PING_S)
        events = "".join(protocol.events(call, turn.result(), sent))
    except CallRejected as rejected:
        session.rejections[rejected.code] += 1
        body = protocol.error_body(rejected)
        error = {**body["error"], "sequence_number": sent, **body, "type": "error"}
        events = f"event: error\ndata: {json.dumps(error)}\n\n"
    finally:
        turn.cancel()
    # A model's arguments may have half of a surrogate pair. It becomes JSON's escape, as which it was sampled.
    await response.write(events.encode("utf-8", "backslashreplace"))
    await response.write_eof()
    return response
