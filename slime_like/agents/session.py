"""One rollout of an agent: its key, calls and limits."""

import asyncio
import secrets
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Any

from slime_like.agents.calls import Call, CallRejected
from slime_like.agents.rendering import ChatFormat, TemplateFault
from slime_like.agents.tool_calls import parse_reply
from slime_like.agents.turns import Prompt, Turn, TurnTree
from slime_like.errors import SlimeLikeError
from slime_like.interfaces import Generation

_CONCURRENT_CALLS = 16
"""Limit on the calls of one session that wait for the engine at the same time."""

_CLOSED = CallRejected(401, "session_closed", "the rollout of this key has ended")


@dataclass(frozen=True, slots=True)
class SampleCall:
    """A request to the engine.

    Attributes:
        number: index of the call in its session, from 0.
        turn: number of assistant turns in its history.
        repeat: number of earlier calls in the session with the same prompt.
        stop: texts that end the turn, besides the run's.
    """

    token_ids: list[int]
    max_new_tokens: int
    number: int
    turn: int
    repeat: int
    stop: tuple[str, ...] = ()


Sample = Callable[[SampleCall], Awaitable[Generation]]


@dataclass(frozen=True, slots=True)
class SessionLimits:
    """Limits of one session: number of calls, tokens per turn, and tokens of prompt plus turn."""

    max_calls: int
    max_new_tokens: int
    max_model_len: int


class Session:
    """Calls of one rollout, recorded as a tree of turns. Belongs to one event loop.

    Args:
        sample: asks the engine; its ``SlimeLikeError`` ends the rollout.
        parser: name of the tool-call parser.

    Attributes:
        key: the client's API key; cannot be guessed.
        failure: set if the engine fails.
        ignored: settings that clients asked for and did not get.
        rejections: number of rejected calls, by code.
    """

    def __init__(self, chat: ChatFormat, sample: Sample, parser: str, limits: SessionLimits) -> None:
        self.key = secrets.token_urlsafe(32)
        self.tree = TurnTree(chat)
        self.failure: asyncio.Future[SlimeLikeError] = asyncio.get_running_loop().create_future()
        self.ignored: dict[str, Any] = {}
        self.rejections: Counter[str] = Counter()
        self._chat = chat
        self._sample = sample
        self._parser = parser
        self._limits = limits
        self._prompts: list[list[int]] = []
        self._running: set[asyncio.Future[Generation]] = set()
        self._closed = False

    def close(self) -> None:
        """Reject further and waiting calls."""
        self._closed = True
        for running in self._running:
            running.cancel()

    async def call(self, call: Call) -> Turn:
        """Sample and record one turn. A cancelled call is not recorded. Raises ``CallRejected``."""
        self._require_room()
        self.ignored |= call.ignored
        if call.tools and not self._chat.renders_tools:
            self.ignored["tools"] = "the chat template renders none"
        try:
            prompt = self.tree.prompt(call.messages, call.tools)
        except TemplateFault as fault:
            raise CallRejected(400, "template_rejects_messages", str(fault)) from fault
        generation = await self._generate(replace(self._asked(prompt), stop=call.stop))
        text = self._chat.continuation(prompt.token_ids, generation.token_ids.tolist(), visible=True)
        text = min((text.partition(stop)[0] for stop in call.stop), key=len, default=text)
        return self.tree.record(prompt, generation, parse_reply(self._parser, text, call.tools))

    def _require_room(self) -> None:
        if self._closed:
            raise _CLOSED
        most = self._limits.max_calls
        if len(self._prompts) >= most:
            raise CallRejected(403, "max_calls_exceeded", f"the rollout has had rollout.agent.max_calls={most} calls")
        if len(self._running) >= _CONCURRENT_CALLS:
            problem = f"{_CONCURRENT_CALLS} calls of this rollout are already waiting"
            raise CallRejected(429, "too_many_calls", problem, retry=True)

    def _asked(self, prompt: Prompt) -> SampleCall:
        """Build the engine request. Raises ``CallRejected`` if the prompt leaves no room for a token."""
        longest = self._limits.max_model_len
        room = longest - len(prompt.token_ids)
        if room < 1:
            # Harnesses look for this wording.
            problem = f"prompt is too long: {len(prompt.token_ids)} tokens > {longest - 1} maximum"
            limit = f"the maximum context length is rollout.max_model_len={longest}"
            raise CallRejected(400, "context_length_exceeded", f"{problem}; {limit}")
        number, repeat = len(self._prompts), self._prompts.count(prompt.token_ids)
        self._prompts.append(prompt.token_ids)
        turn = sum(message.role == "assistant" for message in prompt.messages)
        return SampleCall(prompt.token_ids, min(room, self._limits.max_new_tokens), number, turn, repeat)

    async def _generate(self, asked: SampleCall) -> Generation:
        running = asyncio.ensure_future(self._sample(asked))
        self._running.add(running)
        try:
            generation = await running
        except asyncio.CancelledError:
            if self._closed:
                raise _CLOSED from None
            raise  # the client has disconnected
        except SlimeLikeError as error:
            if not self.failure.done():
                self.failure.set_result(error)
            raise CallRejected(503, "engine_failed", "the engine failed; the rollout ends") from error
        finally:
            self._running.discard(running)
        if self._closed:
            raise _CLOSED
        if generation.finish_reason == "abort" or len(generation.token_ids) == 0:
            raise CallRejected(503, "aborted", "the engine ended the call")
        return generation
