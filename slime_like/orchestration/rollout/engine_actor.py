"""The Ray actor of one rollout engine."""

import asyncio
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

from slime_like.config import RunConfig
from slime_like.data.tokenizer import load_tokenizer
from slime_like.errors import EngineError, SlimeLikeError
from slime_like.interfaces import (
    BucketMetadata,
    EngineHealth,
    Generation,
    GenerationRequest,
    RolloutEngine,
    UpdateReceipt,
)
from slime_like.interfaces.engine import load_engine
from slime_like.orchestration.cluster.node import (
    require_own_devices,
    use_cluster_interface,
    use_log,
    use_session_directory,
)
from slime_like.orchestration.rollout.agents import AgentRollouts
from slime_like.orchestration.rollout.conversations import Conversations

_TOGETHER_S = 0.001
"""Wait for requests that end with the same token. They end one after the other, within less time."""


@dataclass(frozen=True, slots=True)
class Answer:
    """Result of one request: its responses or its error."""

    request_id: str
    generations: list[Generation] = field(default_factory=list)
    error: SlimeLikeError | None = None


class Mailbox(asyncio.Queue[Answer]):
    """Answers for one asker. Belongs to one event loop.

    Attributes:
        expected: number of answers not taken yet, including those that are not ready.
    """

    expected = 0

    async def take(self) -> list[Answer]:
        """Wait for an answer, and return all answers that are ready."""
        answers = [await self.get()]
        await asyncio.sleep(_TOGETHER_S)
        while not self.empty():
            answers.append(self.get_nowait())
        self.expected -= len(answers)
        return answers


class EngineActor:
    """One engine, and the conversations or agents that it samples for.

    Its methods are coroutines, so Ray makes it an asynchronous actor.

    Requests that arrive during a weight update wait until it finishes or fails. The next turn of a conversation may
    arrive at any time.
    """

    def __init__(self, config: RunConfig, index: int, shared_devices: str = "") -> None:
        self._logs = use_log(f"engine-{index}")
        if shared_devices:  # Ray assigns no device to a colocated engine; CUDA is not initialized yet
            os.environ["CUDA_VISIBLE_DEVICES"] = shared_devices
        require_own_devices()
        use_cluster_interface(gloo=False)  # weights come from other hosts
        use_session_directory()
        self._config = config
        self._index = index
        self._engine: RolloutEngine = load_engine(config.rollout.engine)(config, index)
        self._conversations: Conversations | AgentRollouts | None = None
        self._mailboxes: dict[str, Mailbox] = {}
        self._tasks: set[asyncio.Task[None]] = set()  # keeps them alive; the event loop does not
        self._updated = asyncio.Event()
        self._updated.set()

    async def start(self) -> None:
        timeout = self._config.engine_start_timeout_s
        try:
            await asyncio.wait_for(self._engine.start(), timeout)
        except TimeoutError as error:
            raise EngineError(
                f"engine {self._index} ({self._config.rollout.engine}) did not start within {timeout:.0f} s",
                code="engine-start-timeout",
                remedy="raise rollout.start_timeout_s or read its log in the run directory",
            ) from error
        if self._config.rollout.environment.name is not None or self._config.rollout.agent.is_set:
            await self._start_conversations()

    async def _start_conversations(self) -> None:
        tokenizer = await asyncio.to_thread(load_tokenizer, self._config.model.path)
        if self._config.rollout.agent.is_set:
            logs = self._logs, f"agent-{self._index}"
            self._conversations = AgentRollouts(self._config, tokenizer, self._sample, self._version, logs)
        else:
            logs = self._logs, f"environment-{self._index}"
            self._conversations = Conversations(self._config, tokenizer, self._sample, self._engine.abort, logs)
        await self._conversations.start()

    async def _version(self) -> int:
        return (await self._engine.health()).weight_version

    async def submit(self, asker: str, requests: Sequence[GenerationRequest]) -> None:
        """Start ``requests``; ``answers`` returns their results."""
        mailbox = self._mailboxes.setdefault(asker, Mailbox())
        mailbox.expected += len(requests)
        for request in requests:
            task = asyncio.create_task(self._answer(mailbox, request))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def answers(self, asker: str) -> list[Answer]:
        """Return the answers to ``asker``'s requests that are ready, as soon as one is."""
        mailbox = self._mailboxes.setdefault(asker, Mailbox())  # large requests may arrive after this call
        answers = await mailbox.take()
        if mailbox.expected == 0:
            del self._mailboxes[asker]
        return answers

    async def _answer(self, mailbox: Mailbox, request: GenerationRequest) -> None:
        try:
            mailbox.put_nowait(Answer(request.request_id, await self.generate(request)))
        except SlimeLikeError as error:
            mailbox.put_nowait(Answer(request.request_id, error=error))
        except Exception as error:  # raised again by the reader; this class may not cross processes
            failure = EngineError(
                f"{request.request_id} failed: {type(error).__name__}: {error}", code="request-failed"
            )
            mailbox.put_nowait(Answer(request.request_id, error=failure))

    async def generate(self, request: GenerationRequest) -> list[Generation]:
        """Sample a request. With a task, it becomes conversations with the environment, or rollouts of the agent."""
        talks = self._conversations if request.task is not None else None
        answer = self._sample(request) if talks is None else talks.run(request)
        if isinstance(talks, AgentRollouts):  # they have their own limits, and wait for workers
            return await answer
        timeout = self._config.request_timeout_s
        try:
            return await asyncio.wait_for(answer, timeout)
        except TimeoutError as error:
            raise EngineError(
                f"{request.request_id} was not answered within {timeout:.0f} s",
                code="request-timeout",
                remedy="raise rollout.request_timeout_s, or lower rollout.max_concurrent_requests",
            ) from error

    async def _sample(self, request: GenerationRequest) -> list[Generation]:
        await self._updated.wait()  # the request's own timeout bounds this
        return await self._engine.generate(request)

    async def abort(self, request_id: str) -> None:
        if self._conversations is not None:
            await self._conversations.abort(request_id)
        await self._engine.abort(request_id)

    async def connect(self, transport: str, rendezvous: dict[str, Any]) -> None:
        await self._engine.connect(transport, rendezvous)

    async def begin_update(self, version: int) -> None:
        self._updated.clear()
        async with self._opened_by_failure():
            await self._engine.begin_update(version)

    async def update(self, buckets: Sequence[BucketMetadata]) -> None:
        async with self._opened_by_failure():
            for bucket in buckets:
                await self._engine.update(bucket)

    async def finish_update(self, version: int) -> UpdateReceipt:
        async with self._opened_by_failure():
            receipt = await self._engine.finish_update(version)
        self._updated.set()
        return receipt

    @asynccontextmanager
    async def _opened_by_failure(self) -> AsyncIterator[None]:
        """Open the gate after a failed update. The engine then rejects requests with the reason."""
        try:
            yield
        except BaseException:
            self._updated.set()
            raise

    async def sleep(self, keep_weights: bool) -> None:
        await self._engine.sleep(keep_weights)

    async def wake(self, parts: Sequence[Literal["weights", "kv_cache"]]) -> None:
        await self._engine.wake(parts)

    async def health(self) -> EngineHealth:
        return await self._engine.health()

    async def stop(self) -> None:
        if self._conversations is not None:
            await self._conversations.close()
        await self._engine.stop()
