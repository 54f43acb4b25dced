"""One rollout of an agent: its key, calls and limits."""

import asyncio
import secrets
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, TypeVar

import numpy as np

from slime_like.agents.calls import MODEL, Call, CallRejected
from slime_like.agents.rendering import ChatFormat
from slime_like.agents.responses import ResponseForm
from slime_like.agents.turns import Branch, CallPrompt, Turn, TurnTree
from slime_like.config.rollout import Untrained
from slime_like.errors import SlimeLikeError
from slime_like.interfaces import Generation, PromptInput
from slime_like.models.tokenization import EndlessRendering, TemplateFault, TooManyTokens

_Result = TypeVar("_Result")

_CONCURRENT_CALLS = 16
"""Limit on the calls of one session that the engine samples at the same time. Further calls wait."""

_MOST_IGNORED, _SHOWN_CHARS = 32, 80
"""Limits on the ignored settings that are remembered, and on the characters of their names and values."""

_THREADS = ThreadPoolExecutor(32, "agents")
"""Threads for rendering and encoding. A session uses one at a time."""

_CLOSED = CallRejected(401, "session_closed", "the rollout of this key has ended")


@dataclass(frozen=True, slots=True)
class SampleCall:
    """A request to the engine.

    Attributes:
        turn: number of assistant turns in its history.
        repeat: number of earlier calls in the session with the same prompt.
    """

    prompt: PromptInput
    max_new_tokens: int
    number: int
    turn: int
    repeat: int
    stop: tuple[str, ...] = ()


Sample = Callable[[SampleCall], Awaitable[Generation]]


@dataclass(frozen=True, slots=True)
class SessionLimits:
    """Limits of one session: number of calls, tokens per turn, and tokens of prompt plus turn.

    ``stop_token_ids`` end a turn, besides EOS; with ``None``, every special token does.
    """

    max_calls: int
    max_new_tokens: int
    max_model_len: int
    stop_token_ids: tuple[int, ...] | None = None


class Session:
    """Calls of one rollout, recorded as a tree of turns. Belongs to one event loop.

    A ``SlimeLikeError`` of ``sample`` ends the rollout.

    Attributes:
        key: the client's API key; cannot be guessed.
        failure: set if the engine fails.
        ignored: settings that clients asked for and did not get, as text that can be printed.
        rejections: number of rejected calls, by code.
    """

    def __init__(self, chat: ChatFormat, sample: Sample, form: ResponseForm, limits: SessionLimits) -> None:
        self.key = secrets.token_urlsafe(32)
        self.tree = TurnTree(chat.with_limit(limits.max_model_len), limits.stop_token_ids)
        self.failure: asyncio.Future[SlimeLikeError] = asyncio.get_running_loop().create_future()
        self.ignored: dict[str, Any] = {}
        self.rejections: Counter[str] = Counter()
        self._chat = chat.with_limit(limits.max_model_len)
        self._sample = sample
        self._form = form
        self._limits = limits
        self._prompts: Counter[bytes] = Counter()
        self._thread = asyncio.Semaphore()
        self._running: set[asyncio.Future[Generation]] = set()
        self._places = asyncio.Semaphore(_CONCURRENT_CALLS)
        self._others: set[Turn] = set()
        self._closed = False

    def close(self) -> None:
        self._closed = True
        for running in self._running:
            running.cancel()

    def rows(self, untrained: Collection[Untrained] = ()) -> tuple[list[Branch], Turn | None]:
        """Return the rows, the one with the judged turn last, and this turn; ``None`` without a row."""
        if not (turns := self.tree.turns):
            return [], None
        judged = judged_turn([turn for turn in turns if turn not in self._others] or turns)
        rows = self.tree.rows(_untrained(turns, judged, untrained, self._others))
        rows.sort(key=lambda row: judged.number in row.numbers)  # several, if turns continue it: the last
        return (rows, judged) if rows and judged.number in rows[-1].numbers else (rows, None)

    async def outside(self, work: Callable[..., _Result], *given: Any) -> _Result:
        """Work in a thread, because the event loop serves all sessions of an engine. One work at a time.

        Work cannot be stopped, so the next one waits even if the caller is cancelled.
        """
        await self._thread.acquire()
        done = asyncio.get_running_loop().run_in_executor(_THREADS, work, *given)
        done.add_done_callback(lambda _: self._thread.release())
        return await asyncio.shield(done)

    def count_tokens(self, call: Call) -> int:
        """Return the length of the call's prompt in tokens. Raises ``CallRejected``."""
        return len(self._prompt(call).input.token_ids)

    async def call(self, call: Call) -> Turn:
        """Sample and record one turn. A cancelled call is not recorded. Raises ``CallRejected``."""
        return await self.sample(call, *await self.outside(self.prepare, call))

    async def sample(self, call: Call, prompt: CallPrompt, asked: SampleCall) -> Turn:
        """Sample and record the turn of a prepared call. Raises ``CallRejected``."""
        async with self._places:
            generation = await self._generate(asked)
        return await self.outside(self._record, call, prompt, generation)

    def _record(self, call: Call, prompt: CallPrompt, generation: Generation) -> Turn:
        text = self.tree.sampled_text(prompt, generation)
        stop = self._chat.continuation(prompt.input.token_ids, generation.token_ids.tolist()).removeprefix(text)
        text = min((text.partition(end)[0] for end in call.stop), key=len, default=text)
        reply = self._form.message(prompt.text, text, call.tools, stop)
        turn = self.tree.record(prompt, generation, reply, call.tools)
        if call.model not in ("", MODEL):
            self._others.add(turn)
        return turn

    def _prompt(self, call: Call) -> CallPrompt:
        if self._closed:
            raise _CLOSED
        self._ignore(call.ignored)
        if call.tools and not self._chat.renders_tools:
            raise CallRejected(400, "tools_not_rendered", "model.path's chat template shows no tools; use another one")
        if call.tools and not self._form.has_calls:
            self._ignore({"tools": "calls in the form of the chat template are not read"})
        if not self._form.shows_thinking and any(message.reasoning for message in call.messages):
            self._ignore({"thinking": "the chat template renders none"})
        if call.messages[-1].role == "assistant":
            self._ignore({"prefill": "the reply starts a new turn"})
        try:
            return self.tree.prompt(call.messages, call.tools, call.variables)
        except TooManyTokens as error:
            raise self._too_long(*error.args) from error
        except TemplateFault as fault:
            refused, others = "", [message for message in call.messages if message.role != "system"]
            if not isinstance(fault, EndlessRendering) and len(others) < len(call.messages):
                with suppress(TemplateFault):
                    self._chat.with_variables(call.variables).render(others, call.tools)
                    refused = "role 'system' is not supported here: "
            raise CallRejected(400, "template_rejects_messages", f"{refused}{fault}") from fault

    def _ignore(self, settings: Mapping[str, Any]) -> None:
        """Remember ignored settings. Clients choose their names and values."""
        for name, value in settings.items():
            if len(self.ignored) < _MOST_IGNORED:
                self.ignored[_printable(name)] = value if isinstance(value, bool) else _printable(str(value))

    def prepare(self, call: Call) -> tuple[CallPrompt, SampleCall]:
        """Build the prompt and the engine request. Raises ``CallRejected`` if there is no room for another token."""
        if (number := self._prompts.total()) >= self._limits.max_calls:
            problem = f"the rollout has had rollout.agent.max_calls={self._limits.max_calls} calls"
            raise CallRejected(400, "max_calls_exceeded", problem)  # clients take 403 for a wrong key, and repeat 429
        prompt = self._prompt(call)
        tokens = prompt.input.token_ids
        if (room := self._limits.max_model_len - len(tokens)) < 1:
            raise self._too_long(len(tokens))
        known = blake2b(np.asarray(tokens, np.int32).tobytes()).digest()
        repeat = self._prompts[known]
        self._prompts[known] += 1
        turn = sum(message.role == "assistant" for message in prompt.messages)
        most = min(room, self._limits.max_new_tokens)
        return prompt, SampleCall(prompt.input, most, number, turn, repeat, call.stop)

    def _too_long(self, tokens: int) -> CallRejected:
        # Harnesses look for this wording.
        problem = f"prompt is too long: {tokens} tokens > {self._limits.max_model_len - 1} maximum"
        limit = f"the maximum context length is rollout.max_model_len={self._limits.max_model_len}"
        return CallRejected(400, "context_length_exceeded", f"{problem}; {limit}")

    async def _generate(self, asked: SampleCall) -> Generation:
        if self._closed:  # while the call waited for its place
            raise _CLOSED
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


def _printable(text: str) -> str:
    return repr(text[:_SHOWN_CHARS])[1:-1][:_SHOWN_CHARS]


def judged_turn(turns: Sequence[Turn]) -> Turn:
    """Return the rollout's answer: the last turn with the tools that most calls have. Of equally frequent ones, with
    most tools, because titles, probes and summaries have none or few."""
    counts = Counter(turn.tools for turn in turns)
    tools = max(counts, key=lambda names: (counts[names], len(names)))
    return [turn for turn in turns if turn.tools == tools][-1]


def _untrained(
    turns: Sequence[Turn], judged: Turn, kinds: Collection[Untrained], others: Collection[Turn]
) -> set[Turn]:
    """Return the turns to exclude, given all turns in sampling order. ``others`` are turns that name another model.

    The main chain is the judged turn's history. If a harness shortened it, it includes the longer histories before it
    with the same tools, which it does not overlap. A turn is discarded if nothing continues it, but a later turn of the
    same prompt is continued.
    """
    chains: dict[Turn, list[Turn]] = {}
    for turn in turns:
        keys = turn.prompt.keys  # of the history that the call continues, even if the template rewrites it
        begun = [each for each in reversed([*chains]) if keys[: len(each.keys)] == each.keys]
        followed = turn.prompt.parent or max(begun, key=lambda each: len(each.keys), default=None)
        chains[turn] = [*chains[followed], turn] if followed else [turn]
    excluded = set(others) if "other_models" in kinds else set()
    if "discarded" in kinds:
        continued = {turn for chain in chains.values() for turn in chain[:-1]}
        last = {turn.prompt.input.token_ids: at for at, turn in enumerate(turns) if turn in continued}
        left = (turn for at, turn in enumerate(turns) if at < last.get(turn.prompt.input.token_ids, 0))
        excluded |= {turn for turn in left if turn not in continued}
    main = set(chains[judged])
    if "auxiliary" in kinds:
        excluded |= {turn for turn in turns if turn.tools != judged.tools} - main
    if "side_chains" in kinds:
        first = chains[judged][0].number
        while earlier := [
            chain
            for turn, chain in chains.items()
            if turn.number < first and judged.tools and turn.tools == judged.tools and len(chain) > 1
        ]:
            longest = max(earlier, key=lambda chain: (chain[-1].number - chain[0].number, len(chain[-1].token_ids)))
            main |= {*longest}
            first = longest[0].number
        excluded |= set(turns) - main
    return excluded
