"""Responses of several turns, sampled by the engine and answered by the environment. Runs in the engine's actor."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from slime_like.agents.responses import ResponseForm
from slime_like.config.rollout import EnvironmentConfig
from slime_like.interfaces import Conversation, Generation, GenerationRequest, Supports
from slime_like.interfaces.user_code import Step, Task
from slime_like.models.tokenization import decode_exactly
from slime_like.orchestration.rollout.requests import Generate, all_or_none, turn_request
from slime_like.sandbox.observations import ObservationEncoder
from slime_like.sandbox.single_items import EnvironmentPool, NoOutcome


class _Response:
    """Continuation of the prompt so far, token by token."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self._logprobs: list[np.ndarray] = []
        self._versions: list[np.ndarray] = []
        self._supports: list[Supports] = []  # empty if nothing is truncated
        self._turns: list[tuple[int, int]] = []
        self._steps: list[dict[str, Any]] = []
        self._rewards: list[float] = []
        self._success = False
        self._fields = dict[str, np.ndarray]()

    @property
    def length(self) -> int:
        return len(self.tokens)

    def add_turn(self, generation: Generation) -> None:
        """Append a turn of the model. A turn aborted before its first token is ignored."""
        if len(generation.token_ids) == 0:
            return
        self._turns.append((self.length, self.length + len(generation.token_ids)))
        self.tokens += generation.token_ids.tolist()
        self._logprobs.append(generation.logprobs)
        self._versions.append(generation.weight_versions)
        self._fields = generation.extending(self._fields)
        if generation.supports is not None:
            self._supports.append(generation.supports)

    def observe(self, observation: Sequence[int]) -> None:
        """Append tokens that were not sampled: no logprob, and the version of the turn before."""
        self.tokens += observation
        self._logprobs.append(np.zeros(len(observation), np.float32))
        self._versions.append(np.full(len(observation), self._versions[-1][-1], np.int64))
        if self._supports:
            self._supports.append(Supports.whole(len(observation)))

    def add_step(self, step: Step, cut_tokens: int) -> None:
        self._rewards.append(step.reward)
        self._success = step.success
        self._steps.append({**step.metadata, **({"cut_tokens": cut_tokens} if cut_tokens else {})})

    def finish(self, reason: Any, failure: dict[str, str] | None = None) -> Generation:
        """Build the response up to the last sampled token. An observation without an answer cannot be trained on."""
        length = self._turns[-1][1] if self._turns else 0
        return Generation(
            token_ids=np.asarray(self.tokens[:length], np.int64),
            logprobs=np.concatenate([np.zeros(0, np.float32), *self._logprobs])[:length],
            weight_versions=np.concatenate([np.zeros(0, np.int64), *self._versions])[:length],
            supports=Supports.concatenate(self._supports).first(length) if self._supports else None,
            fields=self._fields,
            finish_reason=reason,
            conversation=Conversation(
                turns=tuple(self._turns),
                reward=sum(self._rewards),
                success=self._success,
                failure=failure,
                metadata=tuple(self._steps),
                rewards=tuple(self._rewards),
            ),
        )


class Conversations:
    """Turns of the model, from one engine, and turns of the environment, from its workers.

    A turn's prompt is the token ids of everything before it, exactly as sampled. Nothing is encoded again. The samples
    of a request run independently. A weight update freezes running turns, which then continue with the new weights,
    like any request. Later turns use only the new weights.

    Args:
        form: form of the model's turns.
        generate: ``generate`` of the engine; waits during weight updates.
        logs: directory and name of the log for the environment's output.
    """

    def __init__(
        self, limits: EnvironmentConfig, form: ResponseForm, generate: Generate, logs: tuple[Path, str] | None = None
    ) -> None:
        self._limits, self._form, self._generate = limits, form, generate
        self._encoder = ObservationEncoder(form.tokenizer, limits.template, limits.max_observation_tokens)
        self._pool = EnvironmentPool(limits, logs)

    async def start(self) -> None:
        """Start the workers. Raises ``EnvironmentFailure`` if the environment cannot be used."""
        await self._pool.start()

    async def close(self) -> None:
        await self._pool.close()

    async def run(self, request: GenerationRequest) -> list[Generation]:
        """Run one conversation per sample, in sample order. The request must have a task.

        ``request.sampling.max_new_tokens`` bounds a whole response, including observations.

        Raises:
            EngineError: see the engine's ``generate``.
            EnvironmentFailure: the environment has failed.
        """
        return await all_or_none([self._converse(request, index) for index in range(request.num_samples)])

    async def _converse(self, request: GenerationRequest, index: int) -> Generation:
        assert request.task is not None
        prompt = request.prompt
        task = Task(
            decode_exactly(self._form.tokenizer, prompt.token_ids), request.task.answer, dict(request.task.fields)
        )
        response, step = _Response(), Step()
        for turn in range(self._limits.max_turns):
            room = request.sampling.max_new_tokens - response.length
            limit, tokens = min(room, self._limits.max_turn_tokens or room), [*prompt.token_ids, *response.tokens]
            given = replace(prompt, token_ids=tokens)
            (generation,) = await self._generate(turn_request(request, f"{index}/{turn}", given, limit, (index, turn)))
            response.add_turn(generation)
            if generation.finish_reason == "abort":
                return response.finish("abort")
            sampled = generation.token_ids.tolist()
            stops = (*request.sampling.stop_token_ids, self._form.tokenizer.eos_token_id)
            cut_off = generation.finish_reason == "length"
            if cut_off and not self._pool.judges_cut_turns:
                return response.finish("length")
            (text,) = self._form.decode_turns([(tokens, sampled, stops)])
            try:
                step = await self._pool.step(task, step.state, text, first=turn == 0, truncated=cut_off)
            except NoOutcome as error:
                return response.finish("stop", error.as_failure(str(self._limits.name)))
            ends, stop = step.done or cut_off, next((token for token in sampled[-1:] if token in stops), None)
            observation, cut = (
                ([], 0) if ends else await asyncio.to_thread(self._encoder.encode, step.observation, stop)
            )
            response.add_step(step, cut)
            if ends:
                return response.finish("length" if cut_off else "stop")
            room -= len(generation.token_ids) + len(observation)
            if room < 1:
                return response.finish("length")
            if turn + 1 < self._limits.max_turns:
                response.observe(observation)
        return response.finish("turns")
