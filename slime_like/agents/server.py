"""HTTP server through which agents call the model. Each key opens one session."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, Protocol

from aiohttp import web

from slime_like.agents import anthropic_protocol, openai_protocol
from slime_like.agents.calls import Call, CallRejected
from slime_like.agents.session import Session
from slime_like.agents.turns import Turn
from slime_like.system.network import host_and_port, listen

MODEL = "policy"
"""Model name in ``/v1/models``. Calls may give any name."""

_SERVED = "POST /v1/chat/completions, POST /v1/messages and GET /v1/models are"
_MAX_BODY_BYTES = 32 * 2**20
_BODY_TIMEOUT_S = 30.0
_SHUTDOWN_TIMEOUT_S = 2.0

_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class _WireProtocol(Protocol):
    """Functions of a protocol module."""

    def read_call(self, body: Any) -> Call: ...

    def answer(self, call: Call, turn: Turn) -> dict[str, Any]: ...

    def events(self, call: Call, turn: Turn) -> Iterator[str]: ...

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
        app = web.Application(client_max_size=_MAX_BODY_BYTES, middlewares=[_errors])
        for prefix in ("", "/v1"):
            app.router.add_post(f"{prefix}/chat/completions", self._handler(openai_protocol))
            app.router.add_get(f"{prefix}/models", self._models)
        app.router.add_post("/v1/messages", self._handler(anthropic_protocol))
        self._runner = web.AppRunner(
            app, handler_cancellation=True, access_log=None, shutdown_timeout=_SHUTDOWN_TIMEOUT_S
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

    def _session(self, request: web.Request) -> Session:
        scheme, _, bearer = request.headers.get("Authorization", "").partition(" ")
        key = request.headers.get("x-api-key") or (bearer.strip() if scheme.lower() == "bearer" else "")
        session = self._sessions.get(key)
        if session is None:
            raise CallRejected(401, "invalid_api_key", "no rollout has this key; use the key of the task")
        return session

    async def _models(self, request: web.Request) -> web.Response:
        self._session(request)
        return web.json_response(openai_protocol.model_list(MODEL))

    def _handler(self, protocol: _WireProtocol) -> _Handler:
        async def handle(request: web.Request) -> web.StreamResponse:
            session = self._session(request)
            try:
                call = protocol.read_call(await _json(request))
                turn = await session.call(call)
            except CallRejected as rejected:
                session.rejections[rejected.code] += 1
                raise
            if call.stream:
                return await _stream(request, protocol.events(call, turn))
            return web.json_response(protocol.answer(call, turn))

        return handle


async def _json(request: web.Request) -> Any:
    try:
        async with asyncio.timeout(_BODY_TIMEOUT_S):
            body = await request.read()
    except TimeoutError as error:
        raise CallRejected(408, "body_timeout", f"the body did not arrive within {_BODY_TIMEOUT_S:.0f} s") from error
    try:
        return json.loads(body)
    except RecursionError as error:
        raise CallRejected(400, "invalid_json", "the body is nested too deeply") from error
    except ValueError as error:  # invalid JSON or invalid encoding
        raise CallRejected(400, "invalid_json", f"the body is not JSON ({error})") from error


async def _stream(request: web.Request, events: Iterator[str]) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    await response.prepare(request)
    await response.write("".join(events).encode())
    await response.write_eof()
    return response


@web.middleware
async def _errors(request: web.Request, handler: _Handler) -> web.StreamResponse:
    """Convert every error to the protocol's format."""
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
    protocol = anthropic_protocol if "/messages" in request.path else openai_protocol
    headers = {"x-should-retry": "true" if rejected.retry else "false"}
    return web.json_response(protocol.error_body(rejected), status=rejected.status, headers=headers)
