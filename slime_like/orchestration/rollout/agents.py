"""Rollouts of agents that call the model through an endpoint. Runs in the engine's actor."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from slime_like.agents.rendering import ChatFormat
from slime_like.agents.server import AgentServer
from slime_like.agents.session import Sample, SampleCall, Session, SessionLimits
from slime_like.agents.turns import Branch, Turn
from slime_like.config import RunConfig
from slime_like.config.rollout import AGENT, NODE
from slime_like.errors import AgentFailure
from slime_like.interfaces import Conversation, Generation, GenerationRequest, Supports
from slime_like.interfaces.user_code import AgentResult, AgentTask
from slime_like.models.tokenization import decode_exactly
from slime_like.orchestration.cluster.node import node_address
from slime_like.orchestration.rollout.requests import Generate, all_or_none, routes_per_token, turn_form, turn_request
from slime_like.sandbox.single_items import AgentPool, FailureBudget, NoOutcome

_SUSPICIOUS_ROLLOUTS = 8


@dataclass(frozen=True, slots=True)
class _Outcome:
    """End of a rollout. ``failure`` is the reason if the agent had no result."""

    result: AgentResult = field(default_factory=lambda: AgentResult(0.0))
    failure: dict[str, str] | None = None


class AgentRollouts:
    """Agents in worker processes, and the server through which they call the engine.

    The agent owns the history, and every call sends all of it. Sampled tokens are kept as ids and become the rollout's
    rows. A weight update freezes running calls. Later calls wait for it.

    Args:
        generate: ``generate`` of the engine; waits during weight updates.
        version: returns the weight version that the engine serves.
        logs: directory and name of the log for output of agents.
    """

    def __init__(
        self,
        config: RunConfig,
        tokenizer: Any,
        generate: Generate,
        version: Callable[[], Awaitable[int]],
        logs: tuple[Path, str] | None = None,
    ) -> None:
        self._config = config
        self._agent = config.rollout.agent
        self._tokenizer = tokenizer
        self._form = turn_form(config.data, self._agent, tokenizer)
        self._chat = ChatFormat(self._form.tokenizer, self._form.text_arguments)
        self._generate = generate
        self._version = version
        self._server = AgentServer(node_address() if self._agent.host == NODE else self._agent.host)
        self._pool = AgentPool(self._agent, logs, needs_result=AGENT in (f.name for f in config.reward.functions))
        self._silent = FailureBudget(_SUSPICIOUS_ROLLOUTS)
        self._routes = routes_per_token(config.algorithm, config.model)

    async def start(self) -> None:
        """Start server and workers. Raises ``AgentFailure`` if the agent or the tokenizer cannot be used."""
        if not self._tokenizer.chat_template:
            problem = "the tokenizer has no chat template, which rollout.agent needs"
            raise AgentFailure(problem, code="no-chat-template", who=f"model.path={self._config.model.path}")
        try:
            await self._server.start()
        except OSError as error:
            who, remedy = f"rollout.agent.host={self._agent.host}", "use node, or an address of the engine's host"
            raise AgentFailure(f"cannot listen there: {error}", code="agent-host", who=who, remedy=remedy) from error
        await self._pool.start()

    async def close(self) -> None:
        await self._pool.close()
        await self._server.close()

    async def run(self, request: GenerationRequest) -> list[Generation]:
        """Run one rollout per sample, in sample order. The request must have a task.

        Raises:
            EngineError: see the engine's ``generate``.
            AgentFailure: the agent has failed, or the prompt has fields, which the agent's own prompts would lack.
        """
        if request.prompt.fields:
            problem = f"the prompt has {', '.join(request.prompt.fields)}, which an agent's calls do not pass on"
            raise AgentFailure(problem, code="bad-request", who="rollout.agent", remedy="use rollout.environment")
        return await all_or_none([self._rollout(request, index) for index in range(request.num_samples)])

    async def _rollout(self, request: GenerationRequest, index: int) -> Generation:
        sampling, most = request.sampling, self._agent.max_calls
        limits = SessionLimits(most, sampling.max_new_tokens, self._config.max_model_len, sampling.stop_token_ids)
        session = Session(self._chat, self._sampler(request, index), self._form, limits)
        self._server.open_session(session)
        try:
            outcome = await self._outcome(session, self._task(request, session.key))
        finally:
            self._server.close_session(session.key)
        rows, judged = await session.outside(session.rows, self._agent.untrained)
        if outcome.failure is None:  # the pool counts failures
            self._require_calls(bool(rows), outcome.result)
        if not rows:
            return self._untrained(request, await self._version(), outcome, session)
        return _generation(request, session, rows, judged, outcome)

    def _untrained(self, request: GenerationRequest, version: int, outcome: _Outcome, session: Session) -> Generation:
        """Build a rollout without rows: one token that carries no loss, so its reward counts in the group."""
        routes = self._routes and np.full((len(request.prompt.token_ids), *self._routes), -1, np.int16)
        return Generation(
            token_ids=np.array([self._tokenizer.eos_token_id], np.int64),
            logprobs=np.zeros(1, np.float32),
            weight_versions=np.array([version], np.int64),
            supports=Supports.whole(1) if request.sampling.wants_supports else None,
            fields={} if routes is None else {"routes": routes},
            finish_reason="stop",
            conversation=_conversation((), None, outcome, session),
        )

    def _require_calls(self, has_called: bool, result: AgentResult) -> None:
        """Reject an agent that repeatedly ends without calling the model, since it yields nothing to train on."""
        if self._silent.exhausted(has_called):
            raise AgentFailure(
                f"made no call to train on in any of its first {self._silent.limit} rollouts"
                + (f", and reported {dict(result.metadata)}" if result.metadata else ""),
                code="agent-silent",
                who="rollout.agent",
                remedy="make it call task.base_url with task.key and task.model, and wait for the answer",
            )

    def _task(self, request: GenerationRequest, key: str) -> AgentTask:
        assert request.task is not None
        prompt = decode_exactly(self._tokenizer, request.prompt.token_ids)
        task = request.task
        return AgentTask(prompt, task.messages, task.answer, dict(task.fields), self._server.base_url, key)

    async def _outcome(self, session: Session, task: AgentTask) -> _Outcome:
        """Wait for the agent or an engine failure, whichever comes first."""
        agent = asyncio.ensure_future(self._pool.solve(task))
        try:
            awaited: set[asyncio.Future[Any]] = {agent, session.failure}
            await asyncio.wait(awaited, return_when=asyncio.FIRST_COMPLETED)
            if session.failure.done():
                raise session.failure.result()
            return _Outcome(agent.result())
        except NoOutcome as error:
            return _Outcome(failure=error.as_failure("rollout.agent"))
        finally:
            agent.cancel()
            await asyncio.gather(agent, return_exceptions=True)

    def _sampler(self, request: GenerationRequest, index: int) -> Sample:
        async def sample(asked: SampleCall) -> Generation:
            turn = (index, asked.turn, asked.repeat) if asked.repeat else (index, asked.turn)
            name = f"{index}/{asked.number}"
            stop = (*request.sampling.stop, *asked.stop)
            stopping = replace(request, sampling=replace(request.sampling, stop=stop))
            (generation,) = await self._generate(turn_request(stopping, name, asked.prompt, asked.max_new_tokens, turn))
            return generation

        return sample


def _generation(
    request: GenerationRequest, session: Session, rows: list[Branch], judged: Turn | None, outcome: _Outcome
) -> Generation:
    """Build the rollout's result from its rows. A single row with the request's own prompt is a plain response."""
    last = rows[-1].segment
    reason = last.finish_reason if judged is None else judged.generation.finish_reason
    assert reason is not None  # each row ends with a turn
    is_plain = len(rows) == 1 and [*last.prompt.token_ids] == [*request.prompt.token_ids]
    return Generation(
        token_ids=last.token_ids,
        logprobs=last.logprobs,
        weight_versions=last.weight_versions,
        supports=last.supports,
        fields=last.fields,
        finish_reason=reason,
        conversation=_conversation(rows, judged, outcome, session),
        segments=() if is_plain else tuple(row.segment for row in rows),
    )


def _conversation(rows: Sequence[Branch], judged: Turn | None, outcome: _Outcome, session: Session) -> Conversation:
    result, turns = outcome.result, rows[-1].turns if rows else ()
    calls = tuple(number for row in rows for number in row.calls)
    rewards = tuple(result.call_rewards[one] if one < len(result.call_rewards) else 0.0 for one in calls)
    if not result.call_rewards:
        rewards, calls = (), () if sorted(calls) == [*calls] else calls
    at = -1 if judged is None else rows[-1].numbers.index(judged.number)
    endpoint: dict[str, Any] = {"calls": len(session.tree.turns), "rows": len(rows)}
    endpoint |= {"rejected": dict(session.rejections)} if session.rejections else {}
    endpoint |= {"ignored": session.ignored} if session.ignored else {}
    metadata = {**result.metadata, "endpoint": endpoint}
    outcomes = result.reward, result.success, outcome.failure, (metadata,)
    return Conversation(turns, *outcomes, rewards, calls, at, result.answer)
