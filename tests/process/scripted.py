"""Conversations and agents with a scripted engine, and the rewards of what was said."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np

from slime_like.config import RunConfig
from slime_like.data.prompts import Prompt
from slime_like.errors import EngineError
from slime_like.examples.tiny_model import byte_tokenizer
from slime_like.interfaces import (
    Conversation,
    ConversationTask,
    Generation,
    GenerationRequest,
    PromptInput,
    SamplingParams,
)
from slime_like.orchestration.rollout.requests import to_group
from slime_like.orchestration.rollout.scoring import RewardedGroup, Scorer
from slime_like.sandbox.rewards.pool import RewardPool
from slime_like.trajectory import ScoredTrajectory

TOKENIZER = byte_tokenizer()
EOS = TOKENIZER.eos_token_id
PROMPT = TOKENIZER.encode("<user>hello<assistant>", add_special_tokens=False)
MESSAGES = ({"role": "user", "content": "hello"},)


def ids(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)


def made(tokens: list[int], reason: Any = "stop", version: int = 0) -> Generation:
    count = len(tokens)
    logprobs = -np.arange(1, count + 1, dtype=np.float32)
    return Generation(np.array(tokens, np.int64), logprobs, np.full(count, version, np.int64), reason)


def turn(text: str, reason: str = "stop", version: int = 0) -> Generation:
    return made(ids(text) + ([EOS] if reason == "stop" else []), reason, version)


class Engine:
    """Engine that answers sample i with its script, call by call. "wait" never ends, and "fail" raises."""

    def __init__(self, *scripts: Sequence[Generation | str]) -> None:
        self.scripts = [list(script) for script in scripts]
        self.requests: list[GenerationRequest] = []

    async def generate(self, request: GenerationRequest) -> list[Generation]:
        self.requests.append(request)
        script = self.scripts[int(request.request_id.split("/")[1])]
        said = script.pop(0) if script else "ok"
        if said == "wait":
            await asyncio.Event().wait()
        if said == "fail":
            raise EngineError("it died")
        return [turn(said, version=len(self.requests)) if isinstance(said, str) else said]

    async def version(self) -> int:
        return 7


def request(samples: int = 1, limit: int = 50, **fields: Any) -> GenerationRequest:
    sampling = SamplingParams(temperature=0.7, max_new_tokens=limit, stop_token_ids=(EOS,))
    task = ConversationTask("bye", fields, MESSAGES)
    return GenerationRequest("r", PromptInput(PROMPT), sampling, samples, seed=5, task=task)


Scenario = Callable[[Any], Awaitable[list[Generation]]]


def run(make: Callable[[], Any], asked: GenerationRequest | Scenario) -> list[Generation]:
    """Run a request or a scenario with the ``AgentRollouts`` or ``Conversations`` that ``make`` returns."""

    async def bounded() -> list[Generation]:
        made, pids = make(), ()
        try:
            await made.start()
            pids = made._pool.process_ids
            return await (made.run(asked) if isinstance(asked, GenerationRequest) else asked(made))
        finally:
            await made.close()
            assert not any(Path(f"/proc/{pid}").exists() for pid in pids)

    return asyncio.run(asyncio.wait_for(bounded(), 60))


def talk_of(generation: Generation) -> Conversation:
    assert generation.conversation is not None
    return generation.conversation


def failure(generation: Generation) -> str | None:
    found = talk_of(generation).failure
    return None if found is None else found["reason"]


def rewarded(settings: RunConfig, generations: list[Generation]) -> tuple[RewardedGroup, list[ScoredTrajectory]]:
    """Return the rewarded group of these samples, and its scored rows."""
    group = to_group(Prompt(PromptInput(PROMPT), "bye", 7, 0, 0), generations, 1.0)
    with closing(RewardPool(settings.reward)) as pool:
        scorer = Scorer(settings, pool, TOKENIZER)
        (found,) = scorer.rewards([group])
        return found, scorer.scored([found], step=1)
