"""Samples that take several turns. They run concurrently, and each turn has a different seed."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np

from slime_like.agents.responses import ResponseForm, response_form
from slime_like.config import DataConfig
from slime_like.config.rollout import AgentConfig
from slime_like.interfaces import Generation, GenerationRequest, PromptInput
from slime_like.models.tokenization import with_template_variables

Answer = TypeVar("Answer")
Generate = Callable[[GenerationRequest], Awaitable[list[Generation]]]
"""Type of an engine's ``generate``."""


def turn_form(data: DataConfig, agent: AgentConfig, tokenizer: Any) -> ResponseForm:
    """Return the form of the run's turns. Its tokenizer gives the chat template the run's variables."""
    tokenizer = with_template_variables(tokenizer, data.chat_template_kwargs)
    return response_form(tokenizer, agent.tool_parser)


def turn_request(
    request: GenerationRequest, name: str, prompt: PromptInput, limit: int, turn: tuple[int, ...]
) -> GenerationRequest:
    """Build the engine's request for one turn of one sample of ``request``.

    Args:
        name: the turn's name within ``request``.
        prompt: everything before the turn.
        limit: limit on the turn's new tokens.
        turn: numbers of the sample and the turn. They alone determine the turn's seed, so a repeated rollout is the
            same in whatever order turns arrive.
    """
    seed = None if request.seed is None else int(np.random.SeedSequence([request.seed, *turn]).generate_state(1)[0])
    return replace(
        request,
        request_id=f"{request.request_id}/{name}",
        prompt=prompt,
        sampling=replace(request.sampling, max_new_tokens=limit),
        num_samples=1,
        seed=seed,
        prompt_logprobs=False,
        task=None,
        batch=None,
    )


async def all_or_none(coroutines: Sequence[Coroutine[Any, Any, Answer]]) -> list[Answer]:
    """Gather all results in order; a failure or cancellation cancels the others."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
